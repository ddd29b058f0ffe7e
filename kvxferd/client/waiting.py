"""Waiting for a daemon: only for `connect`, `register`, `attach` and `resume`, and never for ever."""

from __future__ import annotations

import errno

from kvxferd.client.connection import Connection
from kvxferd.client.standing import Standing
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.wire.common import Refusal

# Whoever waits may see these pass: the daemon is not there yet, or its backlog is full.
_PASSING = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN, errno.EINTR})


def await_welcome(connection: Connection, timeout_s: float) -> None:
    """Return once a daemon has welcomed the session. With the lock held. Raises KvxferdError."""
    session = connection.session

    def decided() -> bool:
        over = session.final is not None or _is_lasting(connection.trouble)
        return over or session.standing is Standing.OPEN

    connection.wait(decided, timeout_s)
    if session.standing is Standing.OPEN:
        return
    _raise_if_over(connection)
    where = f"cannot reach kvxferd at {connection.path}"
    if isinstance(connection.trouble, PermissionError):
        raise KvxferdError(
            f"{where}: permission denied; join the group that owns the socket", Code.NOT_ALLOWED
        )
    if _is_lasting(connection.trouble):
        raise KvxferdError(f"{where}: {connection.trouble}", Code.DAEMON_LOST)
    if connection.trouble is not None:
        raise KvxferdError(
            f"{where} within {timeout_s:g} s: {connection.trouble.strerror}; start `kvxferd serve` on this "
            "node, or mount the folder of its socket here",
            Code.DAEMON_LOST,
        )
    raise KvxferdError(
        f"{where} within {timeout_s:g} s: it took the connection and does not greet; look at its log",
        Code.DEADLINE,
    )


def await_answer(connection: Connection, what: str, timeout_s: float) -> Refusal | None:
    """Return None once the daemon has said yes, or its refusal. With the lock held. Raises KvxferdError."""
    session, enrolment = connection.session, connection.session.enrolment

    def decided() -> bool:
        return (
            enrolment.refusal is not None or session.standing is Standing.READY or session.final is not None
        )

    connection.wait(decided, timeout_s)
    enrolment.awaited = False
    if enrolment.refusal is not None:
        return enrolment.refusal
    if session.standing is Standing.READY:
        return None
    _raise_if_over(connection)
    if session.standing is Standing.APART:
        raise KvxferdError(
            f"cannot {what} within {timeout_s:g} s: the daemon at {connection.path} has gone; start it again",
            Code.DAEMON_LOST,
        )
    raise KvxferdError(
        f"cannot {what} within {timeout_s:g} s: the daemon has not answered; look at its log, or wait longer",
        Code.DEADLINE,
    )


def as_error(refusal: Refusal) -> EngineError:
    """Return the daemon's refusal as what a caller is told."""
    error = EngineError(refusal.message, refusal.code)
    error.retry_after_s = refusal.retry_after_s
    return error


def _is_lasting(trouble: OSError | None) -> bool:
    return trouble is not None and trouble.errno not in _PASSING


def _raise_if_over(connection: Connection) -> None:
    if (final := connection.session.final) is not None:
        raise KvxferdError(final.message, final.code)
