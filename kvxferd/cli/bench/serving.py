"""`kvxferd bench --serve`: be the other machine of a bench that runs elsewhere."""

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

from kvxferd.cli.bench import relay, speech
from kvxferd.cli.bench.hosts import VERB, LocalActor, LocalHost, LocalSeat
from kvxferd.cli.children import LINE_BYTES
from kvxferd.cli.running import make_directory, until_signal
from kvxferd.errors import Code, KvxferdError

# What a bench may set: the transport library's own settings, nothing that says what is run.
ENVIRONMENT_PREFIX = "UCX_"
TOKEN_BYTES = 8


def serve(bind: str, say: Callable[[str], None]) -> None:
    """Serve benches, one at a time, until a signal: raises KeyboardInterrupt. Raises KvxferdError."""
    asyncio.run(until_signal(_serve(bind, say)))


async def _serve(bind: str, say: Callable[[str], None]) -> None:
    host, port = relay.split_address(bind)
    token = secrets.token_hex(TOKEN_BYTES)
    desk = _Desk(token, say)
    try:
        server = await asyncio.start_server(desk.meet, host, port, limit=LINE_BYTES)
    except OSError as error:
        raise KvxferdError(f"cannot serve on {bind}: {error.strerror}", Code.CONFIG_INVALID) from error
    bound = server.sockets[0].getsockname()
    named = socket.gethostname() if ipaddress.ip_address(bound[0]).is_unspecified else bound[0]
    say(f"serving; on the other machine: kvxferd bench --peer {named}:{bound[1]}#{token}")
    try:
        await asyncio.Event().wait()
    finally:
        server.close()
        await desk.stop()


class _Desk:
    """Takes one bench at a time."""

    def __init__(self, token: str, say: Callable[[str], None]) -> None:
        self._token = token
        self._say = say
        self._meeting: tuple[asyncio.Task[None], asyncio.StreamWriter] | None = None

    async def stop(self) -> None:
        """End the bench that is served, and return when what it started has ended."""
        if self._meeting is not None:
            # Not cancelled: it may be ending what it started already, and must come to its end.
            task, writer = self._meeting
            writer.close()
            await asyncio.gather(task, return_exceptions=True)

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection, if it has the token and no other is served."""
        try:
            number = await asyncio.wait_for(self._welcome(reader), relay.CONNECT_S)
            if self._meeting is not None:
                raise KvxferdError(f"cannot serve {VERB}: another one is being served", Code.BUSY)
            task = asyncio.current_task()
            assert task is not None
            self._meeting = task, writer
            _write(writer, relay.Granted(number=number))
            self._say(f"a bench from {writer.get_extra_info('peername')[0]}")
            # Where it reached this machine: what was bound may be any address, which nobody can dial.
            await _Guest(writer.get_extra_info("sockname")[0], writer).serve(reader)
            self._say("it has gone; what it started has ended")
        except KvxferdError as error:
            _write(writer, relay.Denied(number=1, code=error.code.value, message=error.message))
        except (OSError, ValueError, TimeoutError):  # a reset, no lines of ours, or nothing at all
            self._say("a connection that was no bench")
        finally:
            if self._meeting is not None and self._meeting[1] is writer:
                self._meeting = None
            writer.close()

    async def _welcome(self, reader: asyncio.StreamReader) -> int:
        hello = relay.WISHES.decode(await reader.readline())
        if not isinstance(hello, relay.Hello) or not _is_same(hello.token, self._token):
            raise KvxferdError(
                f"cannot serve {VERB}: the token is wrong; give --peer what --serve printed", Code.NOT_ALLOWED
            )
        if hello.version != relay.VERSION:
            raise KvxferdError(
                f"cannot serve {VERB}: it speaks version {hello.version} and this side {relay.VERSION}; "
                "install the same kvxferd on both",
                Code.BAD_VERSION,
            )
        return hello.number


class _Guest:
    """One bench that is served: what it has started here."""

    def __init__(self, host: str, writer: asyncio.StreamWriter) -> None:
        self._directory = make_directory("kvxferd-bench-")
        self._here = LocalHost(self._directory, host)
        self._writer = writer
        self._names = itertools.count(1)
        self._actors: dict[int, LocalActor] = {}
        self._seats: dict[int, LocalSeat] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Grant wishes until the connection ends; then end everything."""
        relay.notice_silence(self._writer.get_extra_info("socket"))
        try:
            while line := await reader.readline():
                task = asyncio.ensure_future(self._answer(relay.WISHES.decode(line)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._here.stop()
            shutil.rmtree(self._directory, ignore_errors=True)

    async def _answer(self, wish: relay.AnyWish) -> None:
        try:
            answer: relay.Granted | relay.Denied = await self._grant(wish)
        except KvxferdError as error:
            answer = relay.Denied(number=wish.number, code=error.code.value, message=error.message)
        with contextlib.suppress(OSError):
            _write(self._writer, answer)
            await self._writer.drain()

    async def _grant(self, wish: relay.AnyWish) -> relay.Granted:
        number = wish.number
        match wish:
            case relay.StartDaemon():
                seat = await self._here.start_daemon(_allowed(wish.environment))
                who = next(self._names)
                self._seats[who] = seat
                return relay.Granted(number=number, who=who, worker_socket=seat.worker_socket, pid=seat.pid)
            case relay.Spawn():
                actor = await self._here.spawn(wish.kind, _allowed(wish.environment))
                who = next(self._names)
                self._actors[who] = actor
                return relay.Granted(number=number, who=who)
            case relay.Tell():
                # Decoded and written anew, so that it is one line and nothing but a command.
                line = speech.to_line(speech.read_command(bytes(wish.command)))
                reply = await self._known(wish.who).process.ask(line)
                return relay.Granted(number=number, value=msgspec.Raw(reply.strip()))
            case relay.Pause():
                actor = self._known(wish.who)
                await (actor.pause() if wish.on else actor.resume())
            case relay.Get():
                value = await self._seat(wish.who).get(wish.path)
                return relay.Granted(number=number, value=msgspec.Raw(msgspec.json.encode(value)))
            case relay.End():
                await (self._actors.get(wish.who) or self._seat(wish.who)).stop()
            case _:
                raise KvxferdError(f"cannot serve {VERB}: {type(wish).__name__} comes first, once")
        return relay.Granted(number=number)

    def _known(self, who: int) -> LocalActor:
        if who not in self._actors:
            raise KvxferdError(f"cannot serve {VERB}: nothing here is called {who}", Code.NOT_FOUND)
        return self._actors[who]

    def _seat(self, who: int) -> LocalSeat:
        if who not in self._seats:
            raise KvxferdError(f"cannot serve {VERB}: no daemon here is called {who}", Code.NOT_FOUND)
        return self._seats[who]


def _is_same(token: str, other: str) -> bool:
    # As bytes: of text, the library compares ASCII only, and raises for anything else.
    return hmac.compare_digest(token.encode(errors="replace"), other.encode())


def _allowed(environment: dict[str, str]) -> dict[str, str]:
    if odd := [name for name in environment if not name.startswith(ENVIRONMENT_PREFIX)]:
        raise KvxferdError(f"cannot serve {VERB}: it may not set {', '.join(odd)}", Code.NOT_ALLOWED)
    return environment


def _write(writer: asyncio.StreamWriter, answer: relay.Granted | relay.Denied) -> None:
    writer.write(msgspec.json.encode(answer) + b"\n")
