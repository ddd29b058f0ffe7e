#!/usr/bin/env bash
# Everything about GPU memory, on a bare GPU machine: runs the tests that need a GPU, examines the node, and
# tries every placement.
#
#   deploy/gpu-check.sh [PYTHON]
#
# PYTHON is that of an environment with kvxferd[dev,cuda]; .venv/bin/python where none is named. The last thing
# printed is a short table: placement, works or the exact refusal, GB/s against a device copy.
# Exit status: 0 all works; 1 something does not; 2 kvxferd cannot be run; 3 there is no GPU that can be used.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-.venv/bin/python}
driver=${GPU_CHECK_DRIVER:-cuda}                  # for this script's own test
tests=${GPU_CHECK_TESTS:--m gpu tests}            # words for pytest
tests_limit_s=${GPU_CHECK_TESTS_LIMIT_S:-1500}    # a test that hangs must not keep the table from being printed

if ! "$python" -P -c 'import kvxferd.cli.root' 2>/dev/null; then
	echo "gpu-check: $python cannot import kvxferd: run 'make test' first, or name the Python of another environment" >&2
	exit 2
fi
if ! KVXFERD_DRIVER=$driver "$python" -P -m kvxferd.cli.doctor.seeing_gpus | grep -q '"uuid"'; then
	"$python" -P -m kvxferd.cli doctor --driver "$driver"
	echo "gpu-check: there is no GPU that can be used here, so nothing was tried (exit status 3)"
	exit 3
fi

# shellcheck disable=SC2086 # several words
timeout --kill-after=10 "$tests_limit_s" "$python" -m pytest -q $tests
tests_status=$?
"$python" -P -m kvxferd.cli doctor --gpu --driver "$driver"
doctor_status=$?
if [ $tests_status -ne 0 ]; then
	echo "gpu-check: the tests failed (pytest's exit status $tests_status)"
fi
[ $tests_status -eq 0 ] && [ $doctor_status -eq 0 ]
