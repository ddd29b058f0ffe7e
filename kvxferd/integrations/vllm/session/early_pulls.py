"""Requests of a decode engine whose prompts another engine is still computing.

Such a request has its blocks from the beginning, so that they can be filled meanwhile. Blocks that wait are
of no use to others, so requests beyond the limits stay in vLLM's queue until an earlier one is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvxferd.client import TransferRef


@dataclass(frozen=True, slots=True)
class EarlyPullLimits:
    """How many requests, and blocks of all groups together, may wait for prompts that are being computed."""

    num_requests: int
    num_blocks: int


class EarlyPulls:
    """The requests that wait. Each ends with its pull, so within the pull's deadline."""

    def __init__(self, limits: EarlyPullLimits) -> None:
        self._limits = limits
        self._num_blocks: dict[str, int] = {}  # by request id

    def has_room(self, num_blocks: int) -> bool:
        """Whether a request of so many blocks may wait. One alone always may, else it never could."""
        return not self._num_blocks or (
            len(self._num_blocks) < self._limits.num_requests
            and sum(self._num_blocks.values()) + num_blocks <= self._limits.num_blocks
        )

    def add(self, request_id: str, num_blocks: int) -> None:
        """Record a request that waits, with its blocks."""
        self._num_blocks[request_id] = num_blocks

    def remove(self, request_id: str) -> None:
        """Record that a request's pull has ended, if it is one of these."""
        self._num_blocks.pop(request_id, None)


# When an abandonment is reported again, after the first report. A prompt that is all in the decode engine's
# cache is mostly in the prefill engine's too, and published soon.
REPEAT_ABANDON_S = (0.5, 2.0, 5.0, 15.0)
MAX_LATE_ABANDONS = 1024  # beyond it a transfer ends with its lease


class LateAbandons:
    """Transfers that this engine will not read, and that may be published only later.

    A daemon keeps no report about a transfer that it does not have, so it is repeated for a while.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due: list[tuple[float, TransferRef]] = []

    def add(self, ref: TransferRef) -> None:
        """Repeat the report that `ref` is abandoned."""
        if len(self._due) + len(REPEAT_ABANDON_S) <= MAX_LATE_ABANDONS:
            now = self._clock()
            self._due += [(now + later, ref) for later in REPEAT_ABANDON_S]

    def pop_due(self) -> list[TransferRef]:
        """Return what is to be reported now."""
        if not self._due:
            return []
        now = self._clock()
        due = [ref for when, ref in self._due if when <= now]
        self._due = [one for one in self._due if one[0] > now]
        return due
