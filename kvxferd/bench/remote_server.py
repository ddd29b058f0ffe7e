"""`kvxferd bench --serve`: run as the other machine of a bench that runs elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import itertools
import secrets
import shutil
import socket
from collections.abc import Callable

import msgspec

from kvxferd.bench import protocol, remote_protocol
from kvxferd.bench.hosts import TOOL, LocalDaemon, LocalHost
from kvxferd.errors import Code, KvxferdError
from kvxferd.tooling.async_tasks import run_until_signal
from kvxferd.tooling.line_protocol import encode_line
from kvxferd.tooling.subprocesses import MAX_LINE_BYTES, CommandProcess
from kvxferd.tooling.work_directory import make_work_directory

# A bench may set the transport library's own settings, and nothing that decides what is run.
ENVIRONMENT_PREFIX = "UCX_"
TOKEN_BYTES = 8


def serve_benches(bind: str, say: Callable[[str], None]) -> None:
    """Serve benches, one at a time, until a signal raises KeyboardInterrupt. Raises KvxferdError."""
    asyncio.run(run_until_signal(_serve_until_stopped(bind, say)))


async def _serve_until_stopped(bind: str, say: Callable[[str], None]) -> None:
    host, port = remote_protocol.split_address(bind)
    token = secrets.token_hex(TOKEN_BYTES)
    bench_server = _BenchServer(token, say)
    try:
        server = await asyncio.start_server(bench_server.handle_connection, host, port, limit=MAX_LINE_BYTES)
    except OSError as error:
        raise KvxferdError(f"cannot serve on {bind}: {error.strerror}", Code.CONFIG_INVALID) from error
    bound = server.sockets[0].getsockname()
    named = socket.gethostname() if ipaddress.ip_address(bound[0]).is_unspecified else bound[0]
    say(f"serving; on the other machine: kvxferd bench --peer {named}:{bound[1]}#{token}")
    try:
        await asyncio.Event().wait()
    finally:
        server.close()
        await bench_server.stop()


class _BenchServer:
    """Serves one bench at a time."""

    def __init__(self, token: str, say: Callable[[str], None]) -> None:
        self._token = token
        self._say = say
        self._current: tuple[asyncio.Task[None], asyncio.StreamWriter] | None = None

    async def stop(self) -> None:
        """End the current bench, and return when everything that it started has ended."""
        if self._current is not None:
            # The task is not cancelled: it may be ending its processes already, and must finish that.
            task, writer = self._current
            writer.close()
            await asyncio.gather(task, return_exceptions=True)

    async def handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection if it has the token and no other bench is served."""
        try:
            number = await asyncio.wait_for(self._authenticate(reader), remote_protocol.CONNECT_TIMEOUT_S)
            if self._current is not None:
                raise KvxferdError(f"cannot serve {TOOL}: another one is being served", Code.BUSY)
            task = asyncio.current_task()
            assert task is not None
            self._current = task, writer
            _write(writer, remote_protocol.RemoteDone(number=number))
            self._say(f"a bench from {writer.get_extra_info('peername')[0]}")
            # The address by which it reached this machine: the bound address may be 0.0.0.0.
            await _BenchSession(writer.get_extra_info("sockname")[0], writer).serve(reader)
            self._say("it has gone; what it started has ended")
        except KvxferdError as error:
            _write(
                writer, remote_protocol.RemoteRefused(number=1, code=error.code.value, message=error.message)
            )
        except (OSError, ValueError, TimeoutError):  # a reset, lines of another protocol, or silence
            self._say("a connection that was no bench")
        finally:
            if self._current is not None and self._current[1] is writer:
                self._current = None
            writer.close()

    async def _authenticate(self, reader: asyncio.StreamReader) -> int:
        hello = remote_protocol.REQUESTS.decode(await reader.readline())
        if not isinstance(hello, remote_protocol.Hello) or not _tokens_match(hello.token, self._token):
            raise KvxferdError(
                f"cannot serve {TOOL}: the token is wrong; give --peer what --serve printed", Code.NOT_ALLOWED
            )
        if hello.version != remote_protocol.REMOTE_VERSION:
            raise KvxferdError(
                f"cannot serve {TOOL}: it speaks version {hello.version} and this side "
                f"{remote_protocol.REMOTE_VERSION}; "
                "install the same kvxferd on both",
                Code.BAD_VERSION,
            )
        return hello.number


class _BenchSession:
    """One bench that is served, and the processes that it has started here."""

    def __init__(self, host: str, writer: asyncio.StreamWriter) -> None:
        self._directory = make_work_directory("kvxferd-bench-")
        self._host = LocalHost(self._directory, host)
        self._writer = writer
        self._ids = itertools.count(1)
        self._workers: dict[int, CommandProcess] = {}
        self._daemons: dict[int, LocalDaemon] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Handle requests until the connection ends; then end everything."""
        remote_protocol.enable_keepalive(self._writer.get_extra_info("socket"))
        try:
            while line := await reader.readline():
                task = asyncio.ensure_future(self._reply(remote_protocol.REQUESTS.decode(line)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._host.stop()
            shutil.rmtree(self._directory, ignore_errors=True)

    async def _reply(self, request: remote_protocol.AnyRemoteRequest) -> None:
        try:
            answer: remote_protocol.RemoteDone | remote_protocol.RemoteRefused = await self._handle(request)
        except KvxferdError as error:
            answer = remote_protocol.RemoteRefused(
                number=request.number, code=error.code.value, message=error.message
            )
        except (OSError, ValueError) as error:  # a process does not start, or it is no command
            answer = remote_protocol.RemoteRefused(
                number=request.number,
                code=Code.INTERNAL.value,
                message=f"cannot serve {TOOL}: {type(error).__name__}: {error}",
            )
        with contextlib.suppress(OSError):
            _write(self._writer, answer)
            await self._writer.drain()

    async def _handle(self, request: remote_protocol.AnyRemoteRequest) -> remote_protocol.RemoteDone:
        number = request.number
        match request:
            case remote_protocol.StartDaemon():
                daemon = await self._host.start_daemon(_checked_environment(request.environment))
                who = next(self._ids)
                self._daemons[who] = daemon
                return remote_protocol.RemoteDone(
                    number=number, who=who, worker_socket=daemon.worker_socket, pid=daemon.pid
                )
            case remote_protocol.StartWorker():
                worker = await self._host.start_worker(
                    request.kind, _checked_environment(request.environment)
                )
                who = next(self._ids)
                self._workers[who] = worker
                return remote_protocol.RemoteDone(number=number, who=who)
            case remote_protocol.RunCommand():
                # The command is decoded and encoded again, so that it is one line and a valid command.
                line = encode_line(protocol.PROTOCOL.decode_command(bytes(request.command)))
                reply = await self._worker(request.who).request_line(line)
                return remote_protocol.RemoteDone(number=number, value=msgspec.Raw(reply.strip()))
            case remote_protocol.SetPaused():
                worker = self._worker(request.who)
                await (worker.pause() if request.on else worker.resume())
            case remote_protocol.GetFromDaemon():
                value = await self._daemon(request.who).get(request.path)
                return remote_protocol.RemoteDone(
                    number=number, value=msgspec.Raw(msgspec.json.encode(value))
                )
            case remote_protocol.StopProcess():
                await (self._workers.get(request.who) or self._daemon(request.who)).stop()
            case _:
                raise KvxferdError(f"cannot serve {TOOL}: {type(request).__name__} comes first, once")
        return remote_protocol.RemoteDone(number=number)

    def _worker(self, who: int) -> CommandProcess:
        if who not in self._workers:
            raise KvxferdError(f"cannot serve {TOOL}: nothing here is called {who}", Code.NOT_FOUND)
        return self._workers[who]

    def _daemon(self, who: int) -> LocalDaemon:
        if who not in self._daemons:
            raise KvxferdError(f"cannot serve {TOOL}: no daemon here is called {who}", Code.NOT_FOUND)
        return self._daemons[who]


def _tokens_match(token: str, other: str) -> bool:
    # Compared as bytes: for text the library accepts ASCII only, and raises for anything else.
    return hmac.compare_digest(token.encode(errors="replace"), other.encode())


def _checked_environment(environment: dict[str, str]) -> dict[str, str]:
    if odd := [name for name in environment if not name.startswith(ENVIRONMENT_PREFIX)]:
        raise KvxferdError(f"cannot serve {TOOL}: it may not set {', '.join(odd)}", Code.NOT_ALLOWED)
    return environment


def _write(
    writer: asyncio.StreamWriter, answer: remote_protocol.RemoteDone | remote_protocol.RemoteRefused
) -> None:
    writer.write(msgspec.json.encode(answer) + b"\n")
