"""Logs who requested a change of this node on `control.sock`: one line for each request, at every level."""

from __future__ import annotations

import socket
from pathlib import Path

from aiohttp import web

from kvxferd.redaction import redact
from kvxferd.telemetry.logs import operator_log
from kvxferd.unix_socket import Credentials, credentials_of

MAX_COMMAND_CHARS = 200
MAX_ARGUMENTS_CHARS = 1000


def caller_of(request: web.Request) -> Credentials | None:
    """Return the process that connected; None over TCP, which has no credentials."""
    transport = request.transport
    connection = None if transport is None else transport.get_extra_info("socket")
    if connection is None or connection.family != socket.AF_UNIX:
        return None
    return credentials_of(connection)


async def log_operator_request(request: web.Request, caller: Credentials) -> None:
    """Log a request that may change the node, before it is handled."""
    arguments = request.query_string or (await request.read()).decode(errors="replace")
    operator_log.info(
        "operator request",
        request=f"{request.method} {request.path}",
        arguments=_printable(arguments, MAX_ARGUMENTS_CHARS),
        uid=caller.uid,
        pid=caller.pid,
        command=command_of(caller.pid),
    )


def log_refused_request(request: web.Request, caller: Credentials) -> None:
    """Log a request for a change by a user who is no operator."""
    operator_log.warning(
        "operator request refused",
        limit_by=str(caller.uid),
        request=f"{request.method} {request.path}",
        uid=caller.uid,
        pid=caller.pid,
        command=command_of(caller.pid),
    )


def command_of(pid: int) -> str:
    """Return the command line of a process as one printable line, without secrets; "": it cannot be read.

    Another process may have its number by now, and a process chooses what it shows here: uid and pid are
    the kernel's word, the command is a hint.
    """
    if pid <= 0:  # of a PID namespace that this one does not see
        return ""
    try:
        with Path(f"/proc/{pid}/cmdline").open("rb") as file:
            text = file.read(4 * MAX_COMMAND_CHARS)
    except OSError:
        return ""
    return _printable(text.replace(b"\0", b" ").decode(errors="replace").strip(), MAX_COMMAND_CHARS)


def _printable(text: str, max_chars: int) -> str:
    plain = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in redact(text))
    return plain if len(plain) <= max_chars else plain[: max_chars - 3] + "..."
