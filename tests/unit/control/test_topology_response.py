"""Topologies over HTTP: who is served, how much, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from kvxferd.control import http_connections, topology_response
from kvxferd.control.http_server import HttpServer
from kvxferd.core.topology_builder import TopologyListing
from kvxferd.core.topology_snapshot import TopologySnapshot
from kvxferd.ids import EngineId
from tests.support.http_harness import config_in, over_tcp, over_unix, serving
from tests.support.node_samples import SOURCE, StillNode
from tests.support.topology_samples import sample_topologies

ALL, ONE = "/v1/topology", f"/v1/engines/{SOURCE}/topology"
# The fields that each object has had from the beginning.
KEYS = {"local_rank", "engine_id", "generation", "last_used_s", "stages"}
STAGE_KEYS = {
    "info", "tp_ratio", "block_size_ratio", "handshake_target_ranks", "target_remote_ranks",
    "is_kv_replicated", "replicates_kv_cache", "fa_head_slots", "regions", "splits", "reads",
}  # fmt: skip


async def test_all_and_one_on_both_sockets(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with serving(config, StillNode()) as server, over_tcp(server) as tcp, over_unix(config) as unix:
        for client in (tcp, unix):
            for path in (ALL, ONE):
                async with client.get(path) as answer:
                    assert answer.status == 200
                    value = await answer.json()
                assert value["num_left_out"] == 0
                assert [t["engine_id"] for t in value["topology"]] == [SOURCE, SOURCE]
                for topology in value["topology"]:
                    assert set(topology) >= KEYS
                    assert all(set(stage) == STAGE_KEYS for stage in topology["stages"])
                hybrid, uneven = value["topology"]
                assert hybrid["stages"][0]["fa_head_slots"] == {"0": 0, "1": 1}
                assert uneven["stages"][0]["tp_ratio"] is None


async def test_an_unknown_engine_has_a_code_and_a_sentence(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with serving(config, StillNode()), over_unix(config) as client:
        async with client.get("/v1/engines/nobody/topology") as answer:
            assert answer.status == 404
            error = (await answer.json())["error"]
        assert error["code"] == "engine-unknown"
        assert error["message"].startswith("cannot show the topology of engine 'nobody': ")


async def test_an_engine_id_may_have_a_slash(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with serving(config, StillNode()), over_unix(config) as client:
        error = (await (await client.get("/v1/engines/a%2Fb/topology")).json())["error"]
    assert "engine 'a/b'" in error["message"]


async def test_a_response_is_cut_at_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology_response, "MAX_BYTES", 1)
    config = config_in(tmp_path)
    async with serving(config, StillNode()), over_unix(config) as client:
        value = await (await client.get(ALL)).json()
    assert (len(value["topology"]), value["num_left_out"]) == (1, 1)


async def test_a_response_is_cut_at_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology_response, "MAX_BUILD_S", -1.0)
    config = config_in(tmp_path)
    async with serving(config, StillNode()), over_unix(config) as client:
        value = await (await client.get(ALL)).json()
    assert (len(value["topology"]), value["num_left_out"]) == (0, 2)


async def test_what_is_forgotten_meanwhile_is_not_left_out(tmp_path: Path) -> None:
    class Forgetful(StillNode):
        def topologies(self, engine_id: EngineId | None) -> TopologyListing:
            return TopologyListing(2, iter([None, sample_topologies()[0]]))

    config = config_in(tmp_path)
    async with serving(config, Forgetful()), over_unix(config) as client:
        value = await (await client.get(ALL)).json()
    assert (len(value["topology"]), value["num_left_out"]) == (1, 0)


class Slow(StillNode):
    """A node whose listings do not end before the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.started = asyncio.Event()
        self.may_end = False

    def topologies(self, engine_id: EngineId | None) -> TopologyListing:
        """One, after many pauses."""

        def steps() -> Iterator[TopologySnapshot | None]:
            while not self.may_end:
                self.started.set()
                yield None
            yield sample_topologies()[0]

        return TopologyListing(1, steps())


async def test_strangers_are_served_one_at_a_time_and_operators_all_the_same(tmp_path: Path) -> None:
    config, node = config_in(tmp_path), Slow()
    async with serving(config, node) as server, over_tcp(server) as tcp, over_unix(config) as unix:
        first = asyncio.ensure_future(tcp.get(ALL))
        await asyncio.wait_for(node.started.wait(), 10)
        async with tcp.get(ONE) as answer:
            assert answer.status == 503
            assert (await answer.json())["error"]["code"] == "busy"
        async with tcp.get("/healthz") as answer:
            assert answer.status == 200
        operator = asyncio.ensure_future(unix.get(ONE))
        async with unix.get("/v1/status") as answer:
            assert answer.status == 200
        node.may_end = True
        assert (await first).status == (await operator).status == 200
        async with tcp.get(ONE) as answer:
            assert answer.status == 200


def over_tcp_from(server: HttpServer, address: str) -> aiohttp.ClientSession:
    """Return a client of another source."""
    assert server.tcp_address is not None
    host, port = server.tcp_address
    connector = aiohttp.TCPConnector(local_addr=(address, 0))
    return aiohttp.ClientSession(f"http://{host}:{port}", connector=connector)


async def test_a_source_does_not_take_the_turns_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one waits for the first, for as long as one response takes; no source has two that wait."""
    monkeypatch.setattr(http_connections, "source_of", str)  # loopback has no two sources
    config, node = config_in(tmp_path), Slow()
    async with (
        serving(config, node) as server,
        over_tcp(server) as greedy,
        over_tcp_from(server, "127.0.0.2") as other,
    ):
        first = asyncio.ensure_future(greedy.get(ALL))
        await asyncio.wait_for(node.started.wait(), 10)
        second = asyncio.ensure_future(other.get(ALL))
        turns = server._app[topology_response.TOPOLOGY_TURNS]
        while "127.0.0.2" not in turns._sources:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for client in (greedy, other):
            async with client.get(ALL) as answer:
                assert answer.status == 503
        node.may_end = True
        assert (await first).status == (await second).status == 200
        assert turns.has_room("127.0.0.1")
        assert turns.has_room("127.0.0.2")


async def test_a_stranger_s_turn_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the listing is, it is cut; the next one is served."""
    monkeypatch.setattr(topology_response, "MAX_SHARED_BUILD_S", 0.05)
    config = config_in(tmp_path)
    async with serving(config, Slow()) as server, over_tcp(server) as tcp:
        for _ in range(2):
            async with tcp.get(ALL) as answer:
                assert answer.status == 200
                assert (await answer.json())["num_left_out"] == 1


async def test_few_sources_wait() -> None:
    turns = topology_response.TopologyTurns()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(turns.turn("0"))
        waiting = [asyncio.ensure_future(stack.enter_async_context(turns.turn(str(n)))) for n in range(1, 5)]
        await asyncio.sleep(0)
        assert not turns.has_room("5")
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert turns.has_room("5")
