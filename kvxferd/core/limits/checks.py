"""How much a node accepts before it refuses with `busy`, and when the caller may try again."""

from __future__ import annotations

from collections.abc import Mapping

from kvxferd.config import LimitsConfig
from kvxferd.core.limits.fair_share import RESERVE_DIVISOR, SMALL_DIVISOR, FairShare
from kvxferd.core.limits.table import RETRY_AFTER_S
from kvxferd.errors import OTHER_LIMIT, BusyError

# Limits that refuse with `busy`: settings, then those that are none. A refusal by any other is "other".
BUSY_LIMITS = (
    *("max_sessions", "max_ranks", "max_transfers_per_engine", "max_pulls_per_rank", "max_inflight_bytes"),
    *("max_peers", "max_waiting_per_peer", "max_waiting"),
    *("block_id_bytes", "remote_engine_bytes", "open_requests", "fetched_engines", "member_bytes"),
    *("waiting_bytes", "ended_transfers"),
    *("mover_starts", "grants_per_transfer"),
    *("open_files", "worker_descriptors", "unfinished_registrations", "http", OTHER_LIMIT),
)


def check_count(
    count: int, limit: int, what: str, setting: str, retry_after_s: float = RETRY_AFTER_S
) -> None:
    """Raise BusyError if one more passes the limit. `what` goes into the message, as "register: ..."."""
    if count >= limit:
        raise BusyError(
            f"cannot {what} ({setting} = {limit}); try again in {retry_after_s:g} s",
            retry_after_s,
            _limit_of(setting),
        )


def _limit_of(setting: str) -> str:
    """Return which of `BUSY_LIMITS` a text names, as "limits.max_ranks" or "a sixteenth of" that."""
    name = setting.rpartition("limits.")[2]
    return name if name in BUSY_LIMITS else OTHER_LIMIT


def check_share(
    held_by: Mapping[int, int],
    uid: int,
    limit: int,
    what: str,
    setting: str,
    retry_after_s: float = RETRY_AFTER_S,
) -> None:
    """Raise BusyError if one more passes the limit, or the user's share of it."""
    check_count(sum(held_by.values()), limit, what, setting, retry_after_s)
    if not FairShare.from_counts(limit, held_by).has_room(uid):
        raise BusyError(
            f"cannot {what}, {held_by.get(uid, 0)} of them of uid {uid}, and what is left of "
            f"{setting} = {limit} is for users who have little of it; try again in {retry_after_s:g} s",
            retry_after_s,
            _limit_of(setting),
        )


def check_waiting(num_of_peer: int, num_waiting: int, limits: LimitsConfig) -> None:
    """Raise BusyError if one more waiting request of a peer passes a limit.

    `num_of_peer` of the `num_waiting` requests come from the same CURVE key, or without keys the same route.
    """
    what, most = "wait for what was asked: too many requests wait", limits.max_waiting
    check_count(num_waiting, most, what, "limits.max_waiting")
    check_count(num_of_peer, limits.max_waiting_per_peer, what, "limits.max_waiting_per_peer")
    # The rule of `fair_share` for users: a few peers, each at its own limit, must not exclude others.
    if num_waiting >= most - most // RESERVE_DIVISOR:
        check_count(num_of_peer, max(1, most // SMALL_DIVISOR), what, "a sixteenth of limits.max_waiting")
