"""`make proofs ONLY=chaos-long`: seeds one after another, also after one that fails; then a sum."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from typing import Any

from tests.support.cluster.results import quantile

SUMMED = ("faults", "pulls", "delivered", "failed", "wrong_items", "hung", "leaked")


def run(seed: int, num_faults: int) -> dict[str, Any] | None:
    """Run a seed; return its JSON, or None where it ended without."""
    command = [sys.executable, "-m", "tests.proofs.chaos", "--faults", str(num_faults), "--seed", str(seed)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"seed"')]
    if not lines:
        return None
    result: dict[str, Any] = json.loads(lines[-1])
    return result | {"exit_status": done.returncode}


def summary(seeds: list[int], results: list[dict[str, Any] | None]) -> dict[str, Any]:
    """Return what all seeds came to. `failed_seeds`: those that broke a promise, or ended without JSON."""
    found = [result for result in results if result is not None]
    kinds: Counter[str] = Counter()
    for result in found:
        kinds.update(result["faults_by_kind"])
    samples = [
        (ms, kind, result["seed"])
        for result in found
        for kind, each in result["samples_ms"].items()
        for ms in each
    ]
    every = [ms for ms, _, _ in samples]
    worst = max(samples, default=(None, "", None))
    pairs = zip(seeds, results, strict=True)
    return {
        "seeds": seeds,
        "failed_seeds": [seed for seed, result in pairs if result is None or result["exit_status"]],
        **{name: sum(result[name] for result in found) for name in SUMMED},
        "faults_by_kind": dict(sorted(kinds.items())),
        "recovery_ms_p50": quantile(every, 0.5),
        "recovery_ms_p99": quantile(every, 0.99),
        "recovery_ms_worst": worst[0],
        "worst": f"seed {worst[2]}, after {worst[1]}",
        "slow": [f"seed {result['seed']}: {text}" for result in found for text in result["slow"]],
        "problems": [f"seed {result['seed']}: {text}" for result in found for text in result["problems"]],
        "elapsed_s": round(sum(result["elapsed_s"] for result in found), 1),
    }


def main() -> int:
    arguments = argparse.ArgumentParser(prog="chaos-long", description=__doc__)
    arguments.add_argument("--faults", type=int, default=500, help="of each seed")
    arguments.add_argument("--seeds", default="41,42,43,44,45,46")
    given = arguments.parse_args()
    seeds = [int(seed) for seed in given.seeds.split(",")]
    found = summary(seeds, [run(seed, given.faults) for seed in seeds])
    print(json.dumps(found))
    return 1 if found["failed_seeds"] else 0


if __name__ == "__main__":
    sys.exit(main())
