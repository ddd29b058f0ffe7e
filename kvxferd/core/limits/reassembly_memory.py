"""The memory of block ids that arrive in parts, before the request that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kvxferd.core.limits.ledger import Charge, Ledger
from kvxferd.core.limits.table import ARRIVING_ID_BYTES, ARRIVING_ID_BYTES_OF_OTHERS
from kvxferd.core.ranks.session import Session
from kvxferd.wire.limits import MAX_REQUEST_IDS_BYTES


class ReassemblyMemory:
    """Counts the bytes of sessions' assemblies: one of the largest requests a session, a share a user."""

    def __init__(self, ledger: Ledger, has_rank: Callable[[int], bool]) -> None:
        self._has_rank = has_rank
        self._users_with_rank = ledger[ARRIVING_ID_BYTES]
        self._other_users = ledger[ARRIVING_ID_BYTES_OF_OTHERS]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all users."""
        return self._users_with_rank.held + self._other_users.held

    def charges(self, sessions: Iterable[Session]) -> Iterator[Charge]:
        """Yield what the sessions' assemblies are counted for."""
        for session in sessions:
            limit = ARRIVING_ID_BYTES if session.charged_with_rank else ARRIVING_ID_BYTES_OF_OTHERS
            yield limit, session.uid, session.assembly.num_bytes

    def reserve(self, session: Session, num_bytes: int) -> bool:
        """Reserve `num_bytes`, or release them where it is negative. Return whether there was room."""
        if num_bytes > 0 and not session.assembly.num_bytes:
            # Only while nothing is held: bytes must return to the share that they were taken from.
            session.charged_with_rank = self._has_rank(session.uid)
        shares = self._users_with_rank if session.charged_with_rank else self._other_users
        if num_bytes <= 0:
            shares.release(session.uid, -num_bytes)
            return True
        fits = session.assembly.num_bytes + num_bytes <= MAX_REQUEST_IDS_BYTES
        return fits and shares.acquire(session.uid, num_bytes)
