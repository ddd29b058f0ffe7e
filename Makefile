# make demo | quick | test | proofs | check | docs | clean: each works alone on a fresh clone; the first makes .venv.

PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.13,$(shell command -v python$(v) 2>/dev/null)) python3)
VENV := .venv
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
# The shell's settings for a real daemon are not for tests.
unexport KVXFERD_CONFIG
# Tests start many processes; compiling the package anew costs each of them 0.1 to 0.3 s.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX ?= $(CURDIR)/build/pycache
PYTEST = $(VENV)/bin/pytest -n $(or $(WORKERS),2) --dist loadfile

.PHONY: demo quick test proofs check clean chaos hostile mutants simulate test-random test-vllm test-sglang

# In the smaller environment, unless the other one is there already.
demo: $(or $(wildcard $(STAMP)),$(DEMO_STAMP))
	$(VENV)/bin/kvxferd demo $(DEMO_FLAGS)

# What starts no program and takes no second: what takes longer is named.
quick: $(STAMP)
	$(PYTEST) -m "not process and not slow" --durations=20 --durations-min=1 \
		tests/unit tests/property tests/simulation $(PYTEST_FLAGS)

test: $(STAMP)
	$(PYTEST) tests/unit tests/property tests/simulation tests/integration $(PYTEST_FLAGS)

# What is long or wants the machine alone, one after another; the last table names what ran, and what did not and why.
# ONLY="chaos model": those; ARGS=--stale: those whose paths changed since they passed; see `python -m tests.proofs --help`.
PROOFS = $(VENV)/bin/python -m tests.proofs
proofs: $(STAMP)
	$(PROOFS) $(ONLY) $(ARGS)

# One proof with arguments of its own: make chaos FAULTS=60 SEED=7, make hostile ONLY=flood, make hostile ARGS=--list,
# make mutants GENERATED=100 SEED=7.
chaos hostile mutants simulate: $(STAMP)
	$(PROOFS) $(@:simulate=simulation) --args="$(if $(FAULTS),--faults $(FAULTS)) $(if $(SEED),--seed $(SEED)) \
		$(if $(ONLY),--only $(ONLY)) $(if $(GENERATED),--generated $(GENERATED)) $(ARGS)"

# Random models between random deployments, every byte: N pairs through real movers, N by arithmetic.
test-random: $(STAMP)
	$(PROOFS) random-pairs $(if $(N),--args="--random-pairs $(N)")

# Real vLLM: engines in .venv-vllm (some 4 GB), or with the interpreter that VLLM_PYTHON names. VERSION=0.33: what can
# run of that version, in .venv-vllm-0.33.
test-vllm: export KVXFERD_VLLM_PYTHON := $(or $(VLLM_PYTHON),$(KVXFERD_VLLM_PYTHON))
test-vllm: $(STAMP)
	$(VENV)/bin/python -m tests.proofs.vllm $(if $(VERSION),--version $(VERSION)) $(ARGS)

# Real SGLang: engines in .venv-sglang (some 3 GB), or with the interpreter that SGLANG_PYTHON names.
test-sglang: export KVXFERD_SGLANG_PYTHON := $(or $(SGLANG_PYTHON),$(KVXFERD_SGLANG_PYTHON))
test-sglang: $(STAMP)
	$(VENV)/bin/python -m tests.proofs.sglang $(ARGS)

# The site of docs/, in build/site: `python -m http.server --directory build/site` shows it.
DOCS_STAMP := $(VENV)/.installed-docs
.PHONY: docs
docs: $(DOCS_STAMP)
	$(VENV)/bin/python -m docs.tools.reference_pages
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet

$(DOCS_STAMP): $(STAMP)
	$(PIP_INSTALL) --quiet -e '.[docs]'
	@touch $@

check: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python -m docs.tools.check_pages
	$(VENV)/bin/python -m docs.tools.reference_pages --check

clean:
	rm -rf $(VENV) .venv-vllm* .venv-sglang build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .fuzz

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
