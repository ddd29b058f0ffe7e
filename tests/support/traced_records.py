"""A pull's record with a trace."""

from __future__ import annotations

from kvxferd.records import PullRecord

TRACE, PARENT, OWN = "1" * 32, "a" * 16, "c" * 16
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
STARTED = 1_800_000_000.0


def pull_record(**more: object) -> PullRecord:
    fields: dict[str, object] = {
        "pull": 1, "transfer_id": "t", "source": "p", "sink": "d", "rank": (0, 0), "outcome": "delivered",
        "code": None, "message": "", "bytes": 4096, "runs": 8, "total_s": 2.0, "phases_s": {},
        "started_at": STARTED, "ended_at": STARTED + 2.0, "traceparent": TRACEPARENT, "span_id": OWN,
    }  # fmt: skip
    return PullRecord(**(fields | more))  # type: ignore[arg-type]
