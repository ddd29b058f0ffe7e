"""Limits what sessions keep in the daemon: very little before they are admitted, a share of it after.

A session is admitted once its registration or attachment was found valid; before, it only has the socket's
path. Everything is counted by user, because a user may open many sessions.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvxferd.core.limits.fair_share import FairShare
from kvxferd.errors import Code, ProtocolError, count_busy_refusal
from kvxferd.wire.limits import MAX_FDS_PER_FRAME

# Of sessions that are not admitted. A `register` of 150 KiB arrives whole, so nearly nothing of it is ever
# kept; 32 sessions that each stop in the middle of the largest one are 32 MiB.
MAX_PARTIAL_BYTES = 32 << 20
# Descriptors of frames that are not complete or not handled yet: four full frames.
MAX_PARTIAL_FDS = 4 * MAX_FDS_PER_FRAME


@dataclass(slots=True)
class PartialFrames:
    """What one session that is not admitted keeps of incomplete frames."""

    num_bytes: int = 0
    num_fds: int = 0


class SessionAdmission:
    """The budgets of all sessions of one socket."""

    def __init__(self, max_descriptors: int) -> None:
        self._bytes = FairShare(MAX_PARTIAL_BYTES)
        self._fds = FairShare(MAX_PARTIAL_FDS)
        self.memory_fds = FairShare(max_descriptors)  # of workers' memory: see `fd_budget`

    def charge(self, uid: int, usage: PartialFrames, num_bytes: int, num_fds: int) -> None:
        """Count what a session keeps now. Raises ProtocolError (busy) if that is too much."""
        self._bytes.add(uid, num_bytes - usage.num_bytes)
        self._fds.add(uid, num_fds - usage.num_fds)
        usage.num_bytes, usage.num_fds = num_bytes, num_fds
        if (num_bytes and not self._bytes.has_room(uid, 0)) or (num_fds and not self._fds.has_room(uid, 0)):
            count_busy_refusal("unfinished_registrations")
            raise ProtocolError(
                "cannot take more of what has arrived: too many registrations of this user have begun and "
                "are not whole; try again later",
                Code.BUSY,
            )
