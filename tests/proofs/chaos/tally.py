"""What a run counted, and its one line of JSON."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """Counts over the whole run."""

    faults: Counter[str] = field(default_factory=Counter)
    mischief: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    progressive: Counter[str] = field(default_factory=Counter)  # transfers that grow, and pulls of them
    pulls: int = 0
    delivered: int = 0
    failed: int = 0
    orphaned: int = 0  # their worker was killed first: nobody was left to tell
    unsafe: int = 0  # failed and not safe to reuse, until Quiesced
    wrong_items: int = 0
    hung: int = 0
    leaked: int = 0
    late_unmaps: int = 0  # memory that was unmapped, but more than 1 s after its owner's death
    recovery_ms: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    unmap_ms: list[float] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def problem(self, kind: str, what: str) -> None:
        """Count a broken promise: "hung", "leaked" or "wrong_items"."""
        setattr(self, kind, getattr(self, kind) + 1)
        self.problems.append(f"{kind}: {what}")

    @property
    def is_good(self) -> bool:
        return not (self.wrong_items or self.hung or self.leaked)

    def line(self, seed: int, **more: Any) -> str:
        every = [ms for kind in self.recovery_ms.values() for ms in kind]
        counts = {name: value for name, value in vars(self).items() if isinstance(value, int | Counter)}
        faults = {"faults": self.faults.total(), "faults_by_kind": self.faults}
        times = {
            "recovery_ms_p99": quantile(every, 0.99),
            "unmaps": len(self.unmap_ms),
            "unmap_ms_p99": quantile(self.unmap_ms, 0.99),
            "unmap_ms_max": quantile(self.unmap_ms, 1.0),
            "recovery_ms": {
                kind: {"n": len(ms), "p50": quantile(ms, 0.5), "p99": quantile(ms, 0.99)}
                for kind, ms in sorted(self.recovery_ms.items())
            },
            "slow": self.slow[:20],
            "problems": self.problems[:20],
        }
        return json.dumps({"seed": seed} | counts | faults | times | more)


def quantile(values: list[float], q: float) -> float | None:
    """The value below which that share lies; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 1)
