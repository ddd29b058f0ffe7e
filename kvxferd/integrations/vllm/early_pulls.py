"""Requests of a decode engine whose prompts another engine is still computing: how many may have blocks.

Such a request has its blocks from the beginning, so that they can be filled meanwhile. Blocks that wait are
of no use to others, so requests beyond the limits stay in vLLM's queue until an earlier one is there.
"""

from __future__ import annotations

from dataclasses import dataclass


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
