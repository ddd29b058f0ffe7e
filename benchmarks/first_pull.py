"""A first pull of 64 MiB from a cold start of both daemons, several times over.

Each round is a `kvxferd demo` of its own: two daemons and all ranks start, register, and one
request of 64 MiB moves between engines that have not connected before. Prints medians, or with `--json`
all rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

# 16 layers x (k, v) x 8 heads x 128 x 2 bytes = 64 KiB a token.
TOKENS_64_MIB = 1024
SHAPES = {
    "TP1 -> TP1, same layout": (
        "--prefill-tp 1 --prefill-pp 1 --decode-tp 1 --decode-block-tokens 16 --decode-layout HND"
    ),
    "TP4 PP2 -> TP2, other layout and blocks": "",
}
FIGURES = ("daemons_ready_s", "registered_s", "first_request_s")


def one_round(flags: str) -> dict[str, float]:
    """Run the demo once. Raises CalledProcessError if a byte is wrong or a pull failed."""
    command = [sys.executable, "-m", "kvxferd.cli", "demo", "--json", "--requests", "1"]
    command += ["--tokens", str(TOKENS_64_MIB), *flags.split()]
    said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert said["bytes"] == 64 << 20, said["bytes"]
    return {name: said[name] for name in FIGURES}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {shape: [one_round(flags) for _ in range(options.rounds)] for shape, flags in SHAPES.items()}
    if options.json:
        print(json.dumps(found))
        return
    for shape, rounds in found.items():
        print(shape)
        for name in FIGURES:
            values = sorted(r[name] for r in rounds)
            print(
                f"  {name:16} median {statistics.median(values):.3f} s ({values[0]:.3f} to {values[-1]:.3f})"
            )


if __name__ == "__main__":
    main()
