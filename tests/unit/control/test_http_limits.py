"""HTTP and clients that hold connections open, send without end or read nothing."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import time
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path

import pytest

from kvxferd.config import LimitsConfig
from kvxferd.control import fd_budget, http_connections, response_cache
from kvxferd.control.fd_budget import fd_warnings, max_http_connections, max_memory_fds_of
from kvxferd.control.http_rate_limit import HttpRateLimiter
from kvxferd.control.http_server import HttpServer
from kvxferd.records import NodeSnapshot
from kvxferd.telemetry.warnings import NodeWarning
from tests.support.http_harness import ServedNode, ask, config_in, over_tcp, over_unix, served, serving
from tests.support.node_samples import StillNode, node_warning
from tests.support.other_user import NOBODY, needs_root, open_directory

REQUEST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
UNFINISHED = b"GET /healthz HTTP/1.1\r\nHost: "


async def open_tcp(server: HttpServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*server.tcp_address)


async def status_of(reader: asyncio.StreamReader) -> int:
    line = await asyncio.wait_for(reader.readline(), 10)
    return int(line.split()[1]) if line else 0


async def test_more_unfinished_requests_than_there_is_room_for_keep_nobody_out(tmp_path: Path) -> None:
    async with serving(config_in(tmp_path), StillNode(), 16) as server:
        held = [await open_tcp(server) for _ in range(40)]
        for _, writer in held:
            writer.write(UNFINISHED)
        async with over_tcp(server) as client:
            assert (await ask(client, "/healthz"))[0] == 200
        # Eight of sixteen are TCP's: the others have been closed.
        ends = [asyncio.create_task(reader.read(1)) for reader, _ in held]
        for end in islice(asyncio.as_completed(ends, timeout=20), 40 - 8):
            with suppress(ConnectionError):
                assert await end == b""
        for end, (_, writer) in zip(ends, held, strict=True):
            end.cancel()
            writer.close()


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("127.0.0.1", "127.200.0.9", True),
        ("127.0.0.1", "::1", True),
        ("::ffff:127.0.0.2", "127.0.0.1", True),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_the_addresses_that_one_client_may_have_are_one_source(one: str, other: str, is_same: bool) -> None:
    assert (http_connections.source_of(one) == http_connections.source_of(other)) is is_same


async def test_a_client_elsewhere_keeps_its_place_while_another_opens_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "source_of", str)  # loopback has no two sources
    async with serving(config_in(tmp_path, bind="0.0.0.0:0"), StillNode(), 16) as server:
        port = server.tcp_address[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        await asyncio.sleep(0)
        writer.write(REQUEST)
        assert await status_of(reader) == 200
        for _, each in [*held, (reader, writer)]:
            each.close()


@needs_root
async def test_users_who_fill_the_control_socket_keep_root_not_out() -> None:
    with open_directory() as directory, ExitStack() as closing:
        config = config_in(directory)
        async with serving(config, StillNode(), 16):
            os.chmod(config.control.socket, 0o666)
            os.seteuid(NOBODY)
            try:
                for _ in range(60):
                    held = closing.enter_context(socket.socket(socket.AF_UNIX))
                    held.connect(config.control.socket)
                    held.send(UNFINISHED)
            finally:
                os.seteuid(0)
            async with over_unix(config) as client:
                assert (await ask(client, "/healthz"))[0] == 200
            async with over_unix(config) as client:
                assert (await ask(client, "/v1/drain", "POST"))[0] == 202


@needs_root
async def test_without_descriptors_the_operator_gets_in_and_idle_connections_give_theirs_back() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open_directory() as directory, ExitStack() as closing:
        config = config_in(directory)
        async with serving(config, StillNode()) as server:
            os.chmod(config.control.socket, 0o666)
            idle, writer = await open_tcp(server)
            writer.write(REQUEST)
            assert await status_of(idle) == 200
            await idle.readuntil(b"\r\n\r\n")
            made = [socket.socket(socket.AF_UNIX) for _ in range(4)]
            for each in made:
                closing.enter_context(each)
                each.settimeout(5)
            most = max(int(name) for name in os.listdir("/proc/self/fd"))
            fill: list[int] = []
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1, before[1]))
                with suppress(OSError):
                    while True:
                        fill.append(os.dup(2))
                os.seteuid(NOBODY)
                try:  # they wait before the operator
                    for each in made[:3]:
                        each.connect(config.control.socket)
                finally:
                    os.seteuid(0)
                made[3].connect(config.control.socket)
                made[3].setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(made[3], REQUEST)
                said = await asyncio.wait_for(loop.sock_recv(made[3], 4096), 10)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for fd in fill:
                os.close(fd)
            assert b" 200 " in said.partition(b"\r\n")[0]
            for each in made[:3]:
                assert b" 503 " in each.recv(4096).partition(b"\r\n")[0]
            await asyncio.wait_for(idle.read(), 10)  # ended
            writer.close()


@pytest.mark.parametrize(
    ("sent", "limit"),
    [(b"", "HEADER_S"), (UNFINISHED, "HEADER_S"), (REQUEST, "IDLE_S")],
    ids=["nothing", "half a header", "one request"],
)
async def test_a_client_that_waits_is_closed(
    http: ServedNode, monkeypatch: pytest.MonkeyPatch, sent: bytes, limit: str
) -> None:
    monkeypatch.setattr(http_connections, limit, 0.1)
    monkeypatch.setattr(http_connections, "SWEEP_S", 0.05)
    reader, writer = await open_tcp(http.server)
    writer.write(sent)
    with suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 10)  # its end
    assert not any(share.connections for share in http.server.listeners.shares)
    writer.close()


class Large(StillNode):
    """Its page is larger than what sockets hold by themselves."""

    def warnings(self) -> list[NodeWarning]:
        return [node_warning("x" * (8 << 20))]


async def test_a_client_that_reads_nothing_is_closed_and_costs_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "WRITE_S", 2.0)
    monkeypatch.setattr(http_connections, "SWEEP_S", 0.05)
    loop = asyncio.get_running_loop()
    async with serving(config_in(tmp_path), Large()) as server:
        held = []
        for _ in range(7):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, server.tcp_address)
            await loop.sock_sendall(client, REQUEST.replace(b"/healthz", b"/v1/status"))
            held.append(client)
        beginnings = [await asyncio.wait_for(loop.sock_recv(client, 12), 10) for client in held]
        statuses = [int(beginning.split()[1]) for beginning in beginnings]
        assert set(statuses) == {200, 503}
        assert statuses.count(200) <= http_connections.MAX_UNSENT_BYTES // (8 << 20) + 1
        deadline = time.monotonic() + 10
        while any(c.num_unsent_bytes for share in server.listeners.shares for c in share.connections):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)  # a client that reads nothing receives no end: no event to wait for
        # Closed in time: the end comes before the whole answer.
        for client, status in zip(held, statuses, strict=True):
            num_bytes = 0
            with client, suppress(ConnectionError):
                while status == 200 and (
                    chunk := await asyncio.wait_for(loop.sock_recv(client, 1 << 20), 10)
                ):
                    num_bytes += len(chunk)
            assert num_bytes < 8 << 20


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"x" * 10_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"x" * 10_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 1_000 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00" * 100,
    ],
    ids=["line", "field", "fields", "TLS"],
)
async def test_headers_that_are_too_large_are_refused(
    http: ServedNode, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    reader, writer = await open_tcp(http.server)
    writer.write(sent)
    assert await status_of(reader) in (0, 400, 414, 431)
    writer.close()
    await http.server.stop()
    assert "Traceback" not in caplog.text + capsys.readouterr().err


async def test_a_body_without_end_is_cut(http: ServedNode) -> None:
    reader, writer = await open_tcp(http.server)
    writer.write(b"POST /v1/drain HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n")
    with suppress(ConnectionError):
        for _ in range(64):
            writer.write(b"x" * (64 << 10))
            await writer.drain()
        assert await asyncio.wait_for(reader.read(), 20) is not None
    writer.close()


class Counted(StillNode):
    """Counts the snapshots that are made of it."""

    num_made = 0

    def snapshot(self) -> NodeSnapshot:
        self.num_made += 1
        return super().snapshot()


async def test_strangers_share_a_snapshot_and_an_answer_and_root_gets_its_own(tmp_path: Path) -> None:
    async with served(config_in(tmp_path), Counted()) as http:
        started = time.monotonic()
        for _ in range(10):
            for path in ("/metrics", "/v1/transfers", "/v1/status", "/"):
                assert (await ask(http.tcp, path))[0] == 200
        possible = (time.monotonic() - started) / response_cache.MAX_AGE_S + 1
        assert http.node.num_made <= possible
        before = http.node.num_made
        for _ in range(10):
            assert (await ask(http.unix, "/v1/status"))[0] == 200
        assert http.node.num_made == before + 10


def test_a_source_has_a_pace_and_the_table_of_sources_a_limit() -> None:
    now = 100.0
    pace = HttpRateLimiter(lambda: now)
    delays = [pace.delay_s("10.0.0.1") for _ in range(1_000)]
    burst, per_s, waiting = int(pace.BURST), pace.PER_S, pace.MAX_WAITING
    assert delays[: burst + 2] == [0.0] * burst + [1 / per_s, 2 / per_s]
    assert max(delays) == waiting / per_s
    assert pace.delay_s("10.0.0.2") == 0.0
    now += waiting / per_s + 1.0
    assert [pace.delay_s("10.0.0.1") for _ in range(1_000)].count(0.0) == per_s
    for number in range(10 * HttpRateLimiter.MAX_SOURCES):
        pace.delay_s(f"source {number}")
    assert len(pace._tokens) <= HttpRateLimiter.MAX_SOURCES


def test_http_and_workers_memory_share_what_a_full_node_of_these_limits_leaves_of_the_descriptors() -> None:
    limits = LimitsConfig()
    needed = fd_budget.fds_needed(limits)
    assert [max_http_connections(limit) for limit in (64, 300, 65_536, -1)] == [12, 37, 128, 128]
    assert [max_memory_fds_of(limits, limit) for limit in (1024, 20_000)] == [128, (20_000 - needed) // 2]
    assert max_memory_fds_of(LimitsConfig(max_peers=8), 20_000) > max_memory_fds_of(limits, 20_000)
    assert fd_warnings(limits, needed) == []
    assert "RLIMIT_NOFILE is 300" in fd_warnings(limits, 300)[0]
