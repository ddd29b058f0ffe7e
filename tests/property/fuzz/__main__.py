"""`make proofs ONLY=fuzz`: coverage-guided fuzzing of every target, one line of JSON each.

Each target has a process of its own. What is found is left under `.fuzz/`, as an input that
`python -m tests.property.fuzz TARGET FILE` tries again. Without atheris nothing is tried, and that is said.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

FOUND = Path(".fuzz")
RSS_LIMIT_MIB = 1024
INPUT_LIMIT_S = 10  # longer than this on one input is a stall
MAX_INPUT_BYTES = 1024


def _targets() -> dict[str, Callable[[bytes], object]]:
    from tests.property.fuzz.frames import try_frames, try_payload
    from tests.property.fuzz.layouts import try_layouts
    from tests.property.fuzz.sessions import try_session

    return {"frames": try_frames, "payload": try_payload, "layouts": try_layouts, "sessions": try_session}


NAMES = ("frames", "payload", "layouts", "sessions")
# Streams and payloads are simple: what finds bugs is what comes after.
SHARES = {"frames": 1, "payload": 1, "layouts": 4, "sessions": 4}


def main() -> int:
    """Run every target for its share of the time, or one by name, or one on one input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target", nargs="?", choices=NAMES)
    parser.add_argument("input", nargs="?", type=Path)
    parser.add_argument("--seconds", type=int, default=600)
    requested = parser.parse_args()
    if requested.input is not None:
        _targets()[requested.target](requested.input.read_bytes())
        return 0
    if importlib.util.find_spec("atheris") is None:
        print("skipped: atheris is not installed here; pip install 'kvxferd[fuzz]'")
        return 0
    if requested.target is not None:
        _guided(requested.target, requested.seconds)
        return 0
    found = [_child(name, requested.seconds * SHARES[name] // sum(SHARES.values())) for name in NAMES]
    return int(any(found))


def _child(name: str, seconds: int) -> int:
    """Run one target in a process of its own; return how many inputs broke it."""
    command = [sys.executable, "-m", "tests.property.fuzz", name, "--seconds", str(seconds)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    done = re.search(r"Done (\d+) runs in (\d+) second", run.stderr)
    covered = re.findall(r"cov: (\d+)", run.stderr)
    line = {
        "target": name,
        "executions": int(done[1]) if done else None,
        "seconds": int(done[2]) if done else None,
        "branches": int(covered[-1]) if covered else None,
        "findings": int(run.returncode != 0),
    }
    print(json.dumps(line), flush=True)
    if run.returncode:
        print(run.stdout[-3000:], run.stderr[-6000:], file=sys.stderr, flush=True)
    return run.returncode


def _guided(name: str, seconds: int) -> None:
    import atheris

    with atheris.instrument_imports(include=["kvxferd"]):
        target = _targets()[name]
        if name == "sessions":
            target(b"")  # the tapes are recorded before anything is counted

    def try_one(source: bytes) -> None:
        target(source)

    corpus = FOUND / name
    corpus.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={seconds}",
        f"-rss_limit_mb={RSS_LIMIT_MIB}",
        f"-timeout={INPUT_LIMIT_S}",
        f"-max_len={MAX_INPUT_BYTES}",
        f"-artifact_prefix={FOUND / name}-",
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus)], try_one)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
