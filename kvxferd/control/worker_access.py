"""Decides which processes may connect to the worker socket."""

from __future__ import annotations

from kvxferd.config import WorkerConfig
from kvxferd.core.limits.ledger import Share
from kvxferd.errors import BusyError, Code
from kvxferd.unix_socket import Credentials, is_own_uid
from kvxferd.wire.worker import Farewell


def may_connect(config: WorkerConfig, credentials: Credentials) -> bool:
    """Whether the process's user or group is allowed."""
    uids, gids = config.allowed_uids, config.allowed_gids
    if not uids and not gids:
        return True  # the file's mode has decided
    return is_own_uid(credentials.uid) or credentials.uid in uids or credentials.gid in gids


def rejection(config: WorkerConfig, credentials: Credentials, sessions: Share) -> Farewell | None:
    """Return the message to a process that may not register; None if it may. `sessions`: that are open."""
    if not may_connect(config, credentials):
        text = (
            f"cannot use this socket as uid {credentials.uid}, gid {credentials.gid}: "
            "add one of them to worker.allowed_uids or worker.allowed_gids"
        )
        return Farewell(code=Code.NOT_ALLOWED, message=text)
    try:
        sessions.check(credentials.uid, 1, "take another connection")
    except BusyError as error:
        return Farewell(code=error.code, message=error.message)
    return None
