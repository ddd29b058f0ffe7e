"""The other machine of `--peer` as a `Host`: sends requests of `remote_protocol` over one connection."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from kvxferd.bench import protocol
from kvxferd.bench.hosts import TOOL, R, WorkerKind
from kvxferd.bench.remote_protocol import (
    CONNECT_TIMEOUT_S,
    REMOTE_VERSION,
    REPLIES,
    AnyRemoteRequest,
    GetFromDaemon,
    Hello,
    RemoteDone,
    RunCommand,
    SetPaused,
    StartDaemon,
    StartWorker,
    StopProcess,
    enable_keepalive,
    split_address,
)
from kvxferd.errors import Code, KvxferdError
from kvxferd.tooling.line_protocol import encode_line
from kvxferd.tooling.subprocesses import MAX_LINE_BYTES


class RemoteWorker:
    """A process on the other machine."""

    def __init__(self, host: RemoteHost, who: int) -> None:
        self._host = host
        self._who = who

    async def request(self, command: protocol.Command, kind: type[R]) -> R:
        """Return its reply."""
        raw = msgspec.Raw(encode_line(command).strip())
        answer = await self._host.request(RunCommand(who=self._who, command=raw))
        return protocol.PROTOCOL.decode_reply(
            bytes(answer.value), kind, TOOL, f"{self._host.address}/{self._who}"
        )

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
