"""`python -m tests.proofs.chaos.report OUTPUT...`: the last lines of several runs, as Markdown tables."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tests.support.cluster.results import quantile

SUMMED = ("faults", "pulls", "delivered", "failed", "orphaned", "unsafe", "wrong_items", "hung", "leaked")


def last_line(path: Path) -> dict[str, Any]:
    """A run's JSON."""
    lines = [line for line in path.read_text().splitlines() if line.startswith('{"seed"')]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    print("| " + " | ".join(head) + " |")
    print("|" + " --- |" * len(head))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")
    print()


def main() -> None:
    runs = [last_line(Path(name)) for name in sys.argv[1:]]
    columns = ("seed", *SUMMED, "unmaps", "unmap_ms_max", "recovery_ms_p99", "elapsed_s")
    rows = [tuple(run[column] for column in columns) for run in runs]
    sums = tuple(sum(run[column] for run in runs) for column in (*SUMMED, "unmaps"))
    worst = max((run["unmap_ms_max"] or 0.0 for run in runs), default=0.0)
    samples: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        for kind, each in run.get("samples_ms", {}).items():
            samples[kind] += each
    every = [ms for each in samples.values() for ms in each]
    last = (worst, quantile(every, 0.99), round(sum(run["elapsed_s"] for run in runs), 1))
    table(columns, [*rows, ("sum", *sums, *last)])
    for what in ("faults_by_kind", "outcomes", "mischief"):
        counts: Counter[str] = Counter()
        for run in runs:
            counts.update(run[what])
        table((what, "count"), counts.most_common())
    table(
        ("recovery after", "n", "p50 ms", "p99 ms", "max ms"),
        [
            (kind, len(ms), quantile(ms, 0.5), quantile(ms, 0.99), max(ms))
            for kind, ms in sorted([*samples.items(), ("all", every)])
            if ms
        ],
    )
    for run in runs:
        for what in (*run["problems"], *run.get("slow", ())):
            print(f"* seed {run['seed']}: {what}")


if __name__ == "__main__":
    main()
