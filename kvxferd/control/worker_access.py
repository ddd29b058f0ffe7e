"""Decides which processes may connect to the worker socket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvxferd.config import WorkerConfig
from kvxferd.core.limits.fair_share import FairShare
from kvxferd.errors import Code, count_busy_refusal
from kvxferd.unix_socket import Credentials, is_own_uid
from kvxferd.wire.worker import Farewell


def may_connect(config: WorkerConfig, credentials: Credentials) -> bool:
    """Whether the process's user or group is allowed."""
    uids, gids = config.allowed_uids, config.allowed_gids
    if not uids and not gids:
        return True  # the file's mode has decided
    return is_own_uid(credentials.uid) or credentials.uid in uids or credentials.gid in gids


def rejection(
    config: WorkerConfig, credentials: Credentials, uids: Sequence[int], max_sessions: int
) -> Farewell | None:
    """Return the message to a process that may not register; None if it may. `uids`: of open sessions."""
    if not may_connect(config, credentials):
        text = (
            f"cannot use this socket as uid {credentials.uid}, gid {credentials.gid}: "
            "add one of them to worker.allowed_uids or worker.allowed_gids"
        )
        return Farewell(code=Code.NOT_ALLOWED, message=text)
    if len(uids) >= max_sessions:
        text = (
            f"cannot take another connection: {max_sessions} are open (limits.max_sessions); "
            "close some, or try again later"
        )
        count_busy_refusal("max_sessions")
        return Farewell(code=Code.BUSY, message=text)
    held_by = Counter(uids)
    if not FairShare.from_counts(max_sessions, held_by).has_room(credentials.uid):
        text = (
            f"cannot take another connection of uid {credentials.uid}: "
            f"it has {held_by[credentials.uid]}, and the rest of {max_sessions} "
            "(limits.max_sessions) is for users who have few; close some, or try again later"
        )
        count_busy_refusal("max_sessions")
        return Farewell(code=Code.BUSY, message=text)
    return None
