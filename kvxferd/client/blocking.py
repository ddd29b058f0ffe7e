"""Waiting for a daemon: only `connect`, `register`, `attach` and `resume` wait, each with a limit."""

from __future__ import annotations

import errno

from kvxferd.client.connection import Connection
from kvxferd.client.session_requests import SessionState
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.wire.common import Refusal

# Errors that end by themselves: the daemon is not there yet, or its backlog is full.
_TRANSIENT_ERRNOS = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN, errno.EINTR})


def wait_for_welcome(connection: Connection, timeout_s: float) -> None:
    """Return once a daemon has welcomed the session. Raises KvxferdError. The caller holds the lock."""
    session = connection.session

    def decided() -> bool:
        over = session.close_reason is not None or _is_permanent(connection.connect_error)
        return over or session.state is SessionState.CONNECTED

    connection.wait(decided, timeout_s)
    if session.state is SessionState.CONNECTED:
        return
    _raise_if_closed(connection)
    where = f"cannot reach kvxferd at {connection.path}"
    if isinstance(connection.connect_error, PermissionError):
        raise KvxferdError(
            f"{where}: permission denied; join the group that owns the socket", Code.NOT_ALLOWED
        )
    if _is_permanent(connection.connect_error):
        raise KvxferdError(f"{where}: {connection.connect_error}", Code.DAEMON_LOST)
    if connection.connect_error is not None:
        raise KvxferdError(
            f"{where} within {timeout_s:g} s: {connection.connect_error.strerror}; start `kvxferd serve` on "
            "this node, or mount the folder of its socket here",
            Code.DAEMON_LOST,
        )
    raise KvxferdError(
        f"{where} within {timeout_s:g} s: it took the connection and does not greet; look at its log",
        Code.DEADLINE,
    )


def wait_for_reply(connection: Connection, what: str, timeout_s: float) -> Refusal | None:
    """Return None once the daemon has accepted, or its refusal. Raises KvxferdError.

    The caller holds the lock.
    """
    session, registration = connection.session, connection.session.registration

    def decided() -> bool:
        return (
            registration.reply_refusal is not None
            or session.state is SessionState.READY
            or session.close_reason is not None
        )

    connection.wait(decided, timeout_s)
    registration.caller_waits = False
    if registration.reply_refusal is not None:
        return registration.reply_refusal
    if session.state is SessionState.READY:
        return None
    _raise_if_closed(connection)
    if session.state is SessionState.DISCONNECTED:
        raise KvxferdError(
            f"cannot {what} within {timeout_s:g} s: the daemon at {connection.path} has gone; start it again",
            Code.DAEMON_LOST,
        )
    raise KvxferdError(
        f"cannot {what} within {timeout_s:g} s: the daemon has not answered; look at its log, or wait longer",
        Code.DEADLINE,
    )


def error_from_refusal(refusal: Refusal) -> EngineError:
    """Return the daemon's refusal as the error to raise: its code, message and `retry_after_s`."""
    error = EngineError(refusal.message, refusal.code)
    error.retry_after_s = refusal.retry_after_s
    return error


def _is_permanent(error: OSError | None) -> bool:
    return error is not None and error.errno not in _TRANSIENT_ERRNOS


def _raise_if_closed(connection: Connection) -> None:
    if (final := connection.session.close_reason) is not None:
        raise KvxferdError(final.message, final.code)
