"""Messages between a bench and the other machine of `--peer`, and their connection.

JSON lines over TCP. The first carries the token that `--serve` printed; then each request has a
number, which its answer repeats. What was started there ends when the connection does.
"""

from __future__ import annotations

import socket

import msgspec

from kvxferd.bench.hosts import WorkerKind
from kvxferd.errors import Code, KvxferdError

REMOTE_VERSION = 3
CONNECT_TIMEOUT_S = 10.0
# The kernel's default is two hours.
KEEPALIVE_TIMEOUT_S = 30


class RemoteRequest(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t", tag="Wish", kw_only=True
):
    """Base of requests."""

    number: int = 0


class Hello(RemoteRequest, frozen=True, tag="hello"):
    """The first request of a connection."""

    version: int
    token: str


class StartDaemon(RemoteRequest, frozen=True, tag="start-daemon"):
    """Start a daemon; the reply has its socket."""

    environment: dict[str, str]


class StartWorker(RemoteRequest, frozen=True, tag="spawn"):
    """Start a worker process."""

    kind: WorkerKind
    environment: dict[str, str]


class RunCommand(RemoteRequest, frozen=True, tag="tell"):
    """Send a command to a process; the reply has the process's reply."""

    who: int
    command: msgspec.Raw


class SetPaused(RemoteRequest, frozen=True, tag="pause"):
    """Stop the execution of a process, or continue it."""

    who: int
    on: bool


class GetFromDaemon(RemoteRequest, frozen=True, tag="get"):
    """Send a request to a daemon's control socket."""

    who: int
    path: str


class StopProcess(RemoteRequest, frozen=True, tag="end"):
    """End a process or a daemon."""

    who: int


class RemoteDone(msgspec.Struct, frozen=True, tag_field="t", tag="granted", kw_only=True):
    """The request is done. `who` is the number of a started process."""

    number: int
    who: int = 0
    worker_socket: str = ""
    pid: int = 0
    value: msgspec.Raw = msgspec.Raw(b"null")


class RemoteRefused(msgspec.Struct, frozen=True, tag_field="t", tag="denied", kw_only=True):
    """The request failed."""

    number: int
    code: str
    message: str


AnyRemoteRequest = Hello | StartDaemon | StartWorker | RunCommand | SetPaused | GetFromDaemon | StopProcess
REQUESTS: msgspec.json.Decoder[AnyRemoteRequest] = msgspec.json.Decoder(AnyRemoteRequest)
REPLIES: msgspec.json.Decoder[RemoteDone | RemoteRefused] = msgspec.json.Decoder(RemoteDone | RemoteRefused)


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port``. Raises KvxferdError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) < 1 << 16:
        raise KvxferdError(f"cannot use {address!r}: write HOST:PORT", Code.CONFIG_INVALID)
    return host.strip("[]"), int(port)


def enable_keepalive(connection: socket.socket) -> None:
    """Have a connection end half a minute after the other machine disappears without closing it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_TIMEOUT_S // 2),
        (socket.TCP_KEEPINTVL, KEEPALIVE_TIMEOUT_S // 6),
        (socket.TCP_KEEPCNT, 3),
        (
            socket.TCP_USER_TIMEOUT,
            KEEPALIVE_TIMEOUT_S * 1000,
        ),  # in milliseconds: what was sent and not received
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
