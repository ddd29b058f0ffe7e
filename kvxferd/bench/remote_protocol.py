"""The other machine of `--peer`: what is asked of it, and it as a `Host`.

JSON lines over TCP. The first carries the token that `--serve` printed; then each request has a
number, which its answer repeats. What was started there ends when the connection does.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from kvxferd.bench import protocol
from kvxferd.bench.hosts import TOOL, R, WorkerKind, decode_expected_reply
from kvxferd.errors import Code, KvxferdError
from kvxferd.tooling.subprocesses import MAX_LINE_BYTES

REMOTE_VERSION = 1
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


class RemoteWorker:
    """A process on the other machine."""

    def __init__(self, host: RemoteHost, who: int) -> None:
        self._host = host
        self._who = who

    async def request(self, command: protocol.Command, kind: type[R]) -> R:
        """Return its reply."""
        raw = msgspec.Raw(protocol.encode_line(command).strip())
        answer = await self._host.request(RunCommand(who=self._who, command=raw))
        return decode_expected_reply(f"{self._host.address}/{self._who}", bytes(answer.value), kind)

    async def pause(self) -> None:
        """Stop its execution."""
        await self._host.request(SetPaused(who=self._who, on=True))

    async def resume(self) -> None:
        """Continue its execution."""
        await self._host.request(SetPaused(who=self._who, on=False))

    async def stop(self) -> None:
        """End it."""
        with suppress(KvxferdError):  # without the connection it ends by itself
            await self._host.request(StopProcess(who=self._who))


class RemoteDaemon:
    """A daemon on the other machine."""

    def __init__(self, host: RemoteHost, started: RemoteDone) -> None:
        self._host = host
        self._who = started.who
        self.worker_socket = started.worker_socket
        self.pid = started.pid

    async def get(self, path: str) -> Any:
        """Return the response of its control socket."""
        return msgspec.json.decode((await self._host.request(GetFromDaemon(who=self._who, path=path))).value)

    async def stop(self) -> None:
        """End it."""
        with suppress(KvxferdError):
            await self._host.request(StopProcess(who=self._who))


class RemoteHost:
    """Another machine, on which `kvxferd bench --serve` runs."""

    is_local = False

    def __init__(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.address = address
        self._writer = writer
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[RemoteDone]] = {}
        self._is_lost = False
        self._reader_task = asyncio.ensure_future(self._read_replies(reader))

    @classmethod
    async def connect(cls, address: str, token: str) -> RemoteHost:
        """Connect. Raises KvxferdError if the machine does not respond or refuses the token."""
        host, port = split_address(address)
        try:
            connecting = asyncio.open_connection(host, port, limit=MAX_LINE_BYTES)
            reader, writer = await asyncio.wait_for(connecting, CONNECT_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            raise KvxferdError(
                f"cannot reach {address}: {error or 'no answer'}; start 'kvxferd bench --serve' there",
                Code.PEER_UNREACHABLE,
            ) from error
        enable_keepalive(writer.get_extra_info("socket"))
        remote = cls(address, reader, writer)
        try:
            await remote.request(Hello(version=REMOTE_VERSION, token=token))
        except BaseException:
            await remote.stop()
            raise
        return remote

    @property
    def local_address(self) -> str:
        """The address of this machine on this connection."""
        name: tuple[str, int] = self._writer.get_extra_info("sockname")
        return name[0]

    async def start_daemon(self, environment: Mapping[str, str]) -> RemoteDaemon:
        """Start a daemon there."""
        return RemoteDaemon(self, await self.request(StartDaemon(environment=dict(environment))))

    async def start_worker(self, kind: WorkerKind, environment: Mapping[str, str]) -> RemoteWorker:
        """Start a process there."""
        answer = await self.request(StartWorker(kind=kind, environment=dict(environment)))
        return RemoteWorker(self, answer.who)

    async def stop(self) -> None:
        """Close the connection, which ends everything that was started there."""
        self._writer.close()
        self._reader_task.cancel()
        with suppress(asyncio.CancelledError, OSError):
            await self._reader_task

    async def request(self, request: AnyRemoteRequest) -> RemoteDone:
        """Return the reply. Raises KvxferdError for a refusal, and if the connection is lost."""
        if self._is_lost:
            raise self._lost_error()
        number = next(self._numbers)
        answer: asyncio.Future[RemoteDone] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        try:
            self._writer.write(msgspec.json.encode(msgspec.structs.replace(request, number=number)) + b"\n")
            return await answer
        finally:
            del self._pending[number]

    async def _read_replies(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                answer = REPLIES.decode(line)
                waiting = self._pending.get(answer.number)
                if waiting is None or waiting.done():
                    continue
                if isinstance(answer, RemoteDone):
                    waiting.set_result(answer)
                else:
                    code = Code(answer.code) if answer.code in Code._value2member_map_ else Code.INTERNAL
                    waiting.set_exception(KvxferdError(answer.message, code))
        except (OSError, ValueError):  # a reset, or lines of another protocol
            pass
        finally:
            self._is_lost = True
            for waiting in self._pending.values():
                if not waiting.done():
                    waiting.set_exception(self._lost_error())

    def _lost_error(self) -> KvxferdError:
        return KvxferdError(
            f"cannot run {TOOL}: the other side at {self.address} has gone", Code.PEER_UNREACHABLE
        )
