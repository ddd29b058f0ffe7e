"""How much a node accepts before it refuses with `busy`, and when the caller may try again."""

from __future__ import annotations

from kvxferd.core.limits.table import RETRY_AFTER_S
from kvxferd.errors import OTHER_LIMIT, BusyError

# Limits that refuse with `busy`: settings, then those that are none. A refusal by any other is "other".
BUSY_LIMITS = (
    *("max_sessions", "max_ranks", "max_transfers_per_engine", "max_pulls_per_rank", "max_inflight_bytes"),
    *("max_peers", "block_id_bytes", "remote_engine_bytes", "open_requests", "member_bytes"),
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
            setting.removeprefix("limits."),
        )
