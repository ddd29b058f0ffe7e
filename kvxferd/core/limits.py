"""How much of everything a node takes before it says `busy`, and when to ask again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvxferd.core.fair_share import RESERVE_DIVISOR, SMALL_DIVISOR, FairShare
from kvxferd.errors import BusyError
from kvxferd.ids import SessionId

# What fills a limit ends within seconds where all is well: a pull, a handshake, a grant's wait.
RETRY_AFTER_S = 1.0
# A rank or a peer that goes makes room for another; that is somebody's restart, not a moment.
RETRY_LATER_S = 10.0

# An ended transfer is remembered for `tombstone_s`. 131,072 of them take about 50 MB, and at that
# bound 200 transfers a second are remembered for their whole ten minutes. Of one that was forgotten
# early a late reader hears `transfer-unknown` where it would have heard how the transfer ended.
MAX_TOMBSTONES = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The operator's; each default says its arithmetic in config/kvxferd.toml."""

    max_ranks: int = 128
    max_transfers_per_engine: int = 8192
    max_pulls_per_rank: int = 1024
    max_inflight_bytes: int = 1 << 40
    max_peers: int = 512
    max_waiting_per_peer: int = 8192
    max_waiting: int = 32_768


DEFAULT_LIMITS = Limits()


def check_count(
    count: int, limit: int, what: str, setting: str, retry_after_s: float = RETRY_AFTER_S
) -> None:
    """Raise BusyError where one more would pass the limit. `what` ends a sentence: "register: ..."."""
    if count >= limit:
        raise BusyError(
            f"cannot {what} ({setting} = {limit}); try again in {retry_after_s:g} s", retry_after_s
        )


def check_share(
    held_by: Mapping[int, int],
    uid: int,
    limit: int,
    what: str,
    setting: str,
    retry_after_s: float = RETRY_AFTER_S,
) -> None:
    """Raise BusyError where one more would pass the limit, or that user's share of it."""
    check_count(sum(held_by.values()), limit, what, setting, retry_after_s)
    if not FairShare.from_counts(limit, held_by).has_room(uid):
        raise BusyError(
            f"cannot {what}, {held_by.get(uid, 0)} of them of uid {uid}, and what is left of "
            f"{setting} = {limit} is for users who have little of it; try again in {retry_after_s:g} s",
            retry_after_s,
        )


class PullAdmission:
    """The pulls that run on a node, counted as they come and go."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num_pulls: Counter[SessionId] = Counter()
        self._bytes = FairShare(limits.max_inflight_bytes)

    @property
    def inflight_bytes(self) -> int:
        """What all of them read."""
        return self._bytes.held

    def check(self, session: SessionId, uid: int, size_bytes: int, what: str) -> None:
        """Raise BusyError where one more pull would be too much. One that is too large goes alone."""
        limits, running = self._limits, self._num_pulls[session]
        check_count(
            running,
            limits.max_pulls_per_rank,
            f"{what}: {running} pulls of this rank have not ended",
            "limits.max_pulls_per_rank",
        )
        if self._bytes.held_by(uid) and not self._bytes.has_room(uid, size_bytes):
            raise BusyError(
                f"cannot {what}: {self.inflight_bytes} bytes are being read on this node, "
                f"{self._bytes.held_by(uid)} of them for uid {uid}, and "
                f"limits.max_inflight_bytes = {limits.max_inflight_bytes}; try again in {RETRY_AFTER_S:g} s",
                RETRY_AFTER_S,
            )

    def add(self, session: SessionId, uid: int, size_bytes: int) -> None:
        """A pull has begun."""
        self._num_pulls[session] += 1
        self._bytes.add(uid, size_bytes)

    def remove(self, session: SessionId, uid: int, size_bytes: int) -> None:
        """It is over: nothing writes its blocks any more."""
        self._num_pulls[session] -= 1
        if not self._num_pulls[session]:
            del self._num_pulls[session]
        self._bytes.release(uid, size_bytes)


def check_waiting(num_of_peer: int, num_waiting: int, limits: Limits) -> None:
    """Raise BusyError where one more question of a peer would wait too much.

    `of_peer`: how many of those that wait are of the same CURVE key, or without one of the same route.
    """
    what = "wait for what was asked: too many questions wait"
    check_count(num_waiting, limits.max_waiting, what, "limits.max_waiting")
    check_count(num_of_peer, limits.max_waiting_per_peer, what, "limits.max_waiting_per_peer")
    check_reserve(num_of_peer, num_waiting, limits.max_waiting, what, "limits.max_waiting")


def check_reserve(
    num_of_peer: int, num: int, limit: int, what: str, setting: str, retry_after_s: float = RETRY_AFTER_S
) -> None:
    """Raise BusyError where one more of a peer that has many would be in the last eighth of a limit.

    As of users (`shares`): a few peers with all that each may have must not refuse all others.
    """
    if num >= limit - limit // RESERVE_DIVISOR:
        check_count(
            num_of_peer, max(1, limit // SMALL_DIVISOR), what, f"a sixteenth of {setting}", retry_after_s
        )
