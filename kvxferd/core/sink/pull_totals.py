"""What the pieces of a pull add up to: bytes, runs and times, as its movers reported them."""

from __future__ import annotations

import msgspec

from kvxferd.wire.mover import PiecesRead, PullOutcome

# Of a time in a mover's report: longer than any pull. NaN and infinity are beyond it too.
MAX_REPORTED_S = 1e6
# Of a size: more than any memory. Sums of a million of them are still numbers that can be sent.
MAX_REPORTED = 1 << 43

NOTHING_READ = PullOutcome(delivered=False)


def add_piece(total: PullOutcome, piece: PullOutcome) -> PullOutcome:
    """Return the sizes and times of both. What a resident mover reports is a worker's word: it is limited."""
    return msgspec.structs.replace(
        total,
        bytes=total.bytes + _as_size(piece.bytes),
        runs=total.runs + _as_size(piece.runs),
        queue_s=total.queue_s + as_seconds(piece.queue_s),
        expand_s=total.expand_s + as_seconds(piece.expand_s),
        post_s=total.post_s + as_seconds(piece.post_s),
        wire_s=total.wire_s + as_seconds(piece.wire_s),
        fence_s=total.fence_s + as_seconds(piece.fence_s),
        covered_bytes=total.covered_bytes + _as_size(piece.covered_bytes),
        predicted_s=total.predicted_s + as_seconds(piece.predicted_s),
    )


def pieces_read(total: PullOutcome) -> PiecesRead | None:
    """Return what a mover needs to report the whole pull; None: it reads the first piece."""
    return PiecesRead(total.bytes, total.runs, total.wire_s) if total is not NOTHING_READ else None


def as_seconds(reported: float) -> float:
    """Return a reported time, 0 where it is none: a sum with NaN stays NaN."""
    return reported if 0.0 <= reported <= MAX_REPORTED_S else 0.0


def _as_size(reported: int) -> int:
    return min(max(reported, 0), MAX_REPORTED)
