"""The results of a demo so far: counts, times, whether all bytes were right; and their report for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvxferd.demo.rank import RankResult
from kvxferd.ids import Rank
from kvxferd.telemetry.units import format_time
from kvxferd.tooling.engine_pair import EnginePair
from kvxferd.tooling.output import format_bytes, print_line, print_table, tuple_columns

COUNTS = ("pulls", "delivered", "bytes", "runs", "checked_items", "wrong_items", "spilled_bytes")


@dataclass(slots=True)
class DemoResults:
    """One run of the demo. A pull is one decode rank's read of one request."""

    pair: EnginePair
    wanted: int  # requests
    daemons_ready_s: float = 0.0
    registered_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)  # by the names of COUNTS
    first_wrong: str = ""
    first_failure: str = ""
    pull_s: list[float] = field(default_factory=list)
    request_s: list[float] = field(default_factory=list)  # the first one's with handshakes
    ways: dict[str, int] = field(default_factory=dict)  # bytes by the way in which they were read
    error: str = ""  # why the demo ended early

    @property
    def requests(self) -> int:
        """The number of requests that were moved, or failed."""
        return len(self.request_s)

    @property
    def failed(self) -> int:
        """The number of pulls that failed."""
        return self.counts["pulls"] - self.counts["delivered"]

    @property
    def is_ok(self) -> bool:
        """Whether every requested byte arrived, and no other byte changed."""
        return not self.error and self.requests == self.wanted and self.is_right

    @property
    def is_right(self) -> bool:
        """Whether every pull so far delivered the right bytes, and changed no other."""
        return not (self.failed or self.counts["wrong_items"] or self.counts["spilled_bytes"])

    @property
    def gb_per_s(self) -> float:
        """Delivered bytes divided by the time in which pulls were running, in 10^9 bytes per second."""
        spent = sum(self.request_s)
        return self.counts["bytes"] / spent / 1e9 if spent else 0.0

    def add_request(self, pulled: dict[Rank, RankResult]) -> None:
        """Add what every decode rank reported of one request."""
        where = f"request {self.requests}, "
        self.request_s.append(max(one.elapsed_s for one in pulled.values()))
        for rank, one in pulled.items():
            self.counts.update(
                pulls=1,
                checked_items=one.check.checked_items,
                wrong_items=one.check.wrong_items,
                spilled_bytes=one.spilled_bytes,
            )
            if one.check.first_wrong and not self.first_wrong:
                self.first_wrong = f"{where}{rank}: {one.check.first_wrong}"
            if one.pulled is not None:
                self.counts.update(delivered=1, bytes=one.pulled.bytes, runs=one.pulled.runs)
                self.pull_s.append(one.pulled.elapsed_s)
            elif not self.first_failure:
                self.first_failure = f"{where}{rank}: {one.failure}"

    def as_json(self) -> dict[str, Any]:
        """Return everything as one plain object."""
        p50, p99 = np.percentile(self.pull_s, [50, 99]) if self.pull_s else (0.0, 0.0)
        return {
            "ok": self.is_ok,
            "error": self.error,
            "prefill": str(self.pair.prefill),
            "decode": str(self.pair.decode),
            "requests": self.requests,
            **{name: self.counts[name] for name in COUNTS},
            "failed": self.failed,
            "first_failure": self.first_failure,
            "first_wrong": self.first_wrong,
            "ways": self.ways,
            "gb_per_s": round(self.gb_per_s, 3),
            "daemons_ready_s": round(self.daemons_ready_s, 4),
            "registered_s": round(self.registered_s, 4),
            "first_request_s": round(self.request_s[0], 6) if self.request_s else 0.0,
            "pull_s": {"p50": round(float(p50), 6), "p99": round(float(p99), 6)},
        }

    def describe_last(self) -> str:
        """Return a line on the last request."""
        verdict = "every byte is right" if self.is_right else "FAILED"
        return f"request {self.requests} of {self.wanted}: {format_time(self.request_s[-1])}, {verdict}"


def print_report(results: DemoResults, equal: DemoResults | None = None) -> None:
    """Print the tables and the verdict; `equal`: the same between equal engines, to compare with."""
    compared = [("these engines", results), *([] if equal is None else [("equal engines", equal)])]
    rows = zip(*(_total_cells(one) for _, one in compared), strict=True)
    columns = tuple_columns("", *(title for title, _ in compared))
    print_table("kvxferd demo", columns, [(name, *cells) for name, cells in zip(_TOTALS, rows, strict=True)])
    for line in _verdict(results):
        print_line(line)
    for line in ("equal engines:", *_verdict(equal)) if equal is not None and not equal.is_ok else ():
        print_line(line)


_TOTALS = (
    *("prefill", "decode", "model", "requests", "pulls", "bytes", "runs", "read", "rate", "pull p50 / p99"),
    *("first request", "daemons ready", "ranks registered"),
)


def _total_cells(results: DemoResults) -> tuple[str, ...]:
    pair, counts, seen = results.pair, results.counts, results.as_json()
    key = pair.model.token_arrays[0][0]
    return (
        str(pair.prefill),
        str(pair.decode),
        f"{pair.model.num_layers} layers, {key.num_heads} KV heads of {key.head_bytes // key.itemsize}",
        f"{results.requests} of {pair.num_tokens} tokens",
        f"{counts['delivered']} delivered, {results.failed} failed",
        format_bytes(counts["bytes"]),
        f"{counts['runs']:,} of {format_bytes(counts['bytes'] / max(1, counts['runs']))}",
        " and ".join(way for way, num_bytes in sorted(results.ways.items()) if num_bytes) or "-",
        f"{results.gb_per_s:.2f} GB/s",
        f"{format_time(seen['pull_s']['p50'])} / {format_time(seen['pull_s']['p99'])}",
        format_time(seen["first_request_s"]),
        format_time(results.daemons_ready_s),
        format_time(results.registered_s),
    )


def _verdict(results: DemoResults) -> Iterator[str]:
    counts = results.counts
    yield (
        f"checked {counts['checked_items']} items (layer, component, head, token): {counts['wrong_items']} "
        f"wrong; {counts['spilled_bytes']} bytes changed outside the pulled blocks"
    )
    for wrong in (results.first_wrong, results.first_failure, results.error):
        if wrong:
            yield from wrong.splitlines()
    yield "every byte is right" if results.is_ok else "FAILED"
