"""Logs who requested a change of this node on `control.sock`: one line for each request, at every level."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import unquote_plus

from aiohttp import web

from kvxferd.redaction import redact
from kvxferd.telemetry.logs import operator_log
from kvxferd.unix_socket import Credentials, credentials_of

MAX_ARGUMENTS_CHARS = 1000


def caller_of(request: web.Request) -> Credentials | None:
    """Return the process that connected; None over TCP, which has no credentials."""
    transport = request.transport
    connection = None if transport is None else transport.get_extra_info("socket")
    if connection is None or connection.family != socket.AF_UNIX:
        return None
    return credentials_of(connection)


def log_operator_request(request: web.Request, caller: Credentials) -> None:
    """Log a request that may change the node, before it is handled."""
    text = redact(unquote_plus(request.query_string))
    arguments = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    if len(arguments) > MAX_ARGUMENTS_CHARS:
        arguments = arguments[: MAX_ARGUMENTS_CHARS - 3] + "..."
    operator_log.info(
        "operator request",
        request=f"{request.method} {request.path}",
        arguments=arguments,
        uid=caller.uid,
        pid=caller.pid,
        program=_program_of(caller.pid),
    )


def log_refused_request(request: web.Request, caller: Credentials) -> None:
    """Log a request for a change by a user who is no operator."""
    operator_log.warning(
        "operator request refused",
        limit_by=str(caller.uid),
        request=f"{request.method} {request.path}",
        uid=caller.uid,
        pid=caller.pid,
        program=_program_of(caller.pid),
    )


def _program_of(pid: int) -> str:
    """Return the name of a process's program as it gives it, a hint; "": it cannot be read."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""
    return repr(name)[1:-1]  # printable
