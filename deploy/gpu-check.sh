#!/usr/bin/env bash
# Everything about GPU memory, on a bare GPU machine: runs the tests that need a GPU, examines the node, and
# tries every placement.
#
#   deploy/gpu-check.sh [PYTHON [WHEELS]]
#
# PYTHON is that of an environment with kvxferd[dev,cuda]; .venv/bin/python where none is named. Where there is no
# network: any Python that has torch, numpy and pip, and a folder of wheels of what else it lacks
# (deploy/gpu-wheels.txt). They go to a temporary folder; kvxferd itself is taken from here.
# In between it measures the scatters of covering reads in the GPU, and compares their bytes.
# The last lines printed are the placements: GB/s, or the exact refusal.
# Exit status: 0 all works; 1 something does not; 2 kvxferd cannot be run; 3 there is no GPU that can be used.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-.venv/bin/python}
driver=${GPU_CHECK_DRIVER:-cuda}                  # "fake" tries this script and the tests without a GPU
files="tests/integration/gpu tests/unit/memory/test_driver_contract.py"
[ "$driver" = fake ] && chosen="-k fake" || chosen="-m gpu"
tests=${GPU_CHECK_TESTS:-$chosen $files}          # words for pytest; the other files import what is not here
tests_limit_s=${GPU_CHECK_TESTS_LIMIT_S:-1500}    # a test that hangs must not keep the table from being printed

if [ $# -gt 1 ]; then
	site=$(mktemp -d) || exit 2
	trap 'rm -rf "$site"' EXIT
	if ! "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
		--no-cache-dir --target "$site" "$2"/*.whl; then
		echo "gpu-check: the wheels in $2 cannot be installed for $python: fetch them for its version" >&2
		exit 2
	fi
	export PYTHONPATH=$site:$PWD${PYTHONPATH:+:$PYTHONPATH}
fi
if [ "$driver" = fake ]; then
	driver=tests.support.fake_driver:FakeDriver
	export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
fi
if ! "$python" -P -c 'import kvxferd.cli.root' 2>/dev/null; then
	echo "gpu-check: $python cannot import kvxferd: run 'make test' first, or name the Python of another environment" >&2
	exit 2
fi
if ! "$python" -P -m kvxferd.cli doctor --driver "$driver" --check gpus --json | grep -q '"uuid"'; then
	"$python" -P -m kvxferd.cli doctor --driver "$driver"
	echo "gpu-check: there is no GPU that can be used here, so nothing was tried (exit status 3)"
	exit 3
fi

# shellcheck disable=SC2086 # several words
timeout --kill-after=10 "$tests_limit_s" "$python" -m pytest -q $tests
tests_status=$?
timeout --kill-after=10 300 "$python" -m benchmarks.scatter_trial "$driver"
scatter_status=$?
"$python" -P -m kvxferd.cli doctor --gpu --driver "$driver"
doctor_status=$?
if [ $tests_status -ne 0 ]; then
	echo "gpu-check: the tests failed (pytest's exit status $tests_status)"
fi
if [ $scatter_status -ne 0 ]; then
	echo "gpu-check: layouts that differ are not scattered right in the GPU (exit status $scatter_status)"
fi
[ $tests_status -eq 0 ] && [ $scatter_status -eq 0 ] && [ $doctor_status -eq 0 ]
