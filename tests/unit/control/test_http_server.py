"""HTTP on real sockets: who is answered what, and what is left behind."""

import os
import socket
import stat
from pathlib import Path

import pytest

from kvxferd.control.http_routes import ROUTES, Access
from kvxferd.core.snapshot import NodeSnapshot
from kvxferd.errors import Code, ConfigError
from kvxferd.telemetry.history import record_from_json
from tests.support.http_harness import config_in, over_tcp, over_unix, serving
from tests.support.node_samples import SOURCE, StillNode, node_snapshot, records

READ_ROUTES = [route.path for route in ROUTES if route.access is Access.ANYONE]
NOBODY = 65_534


async def test_reading_is_the_same_on_both(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with serving(config, StillNode()) as server, over_tcp(server) as tcp, over_unix(config) as unix:
        for path in (route.format(engine_id=SOURCE) for route in READ_ROUTES):
            for client in (tcp, unix):
                query = {"id": "req-1"} if path == "/transfers" else {}
                async with client.get(path, params=query) as answer:
                    assert answer.status == 200, path
        async with tcp.get("/metrics") as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert "kvxferd_registered_ranks" in await answer.text()


async def test_json_holds_what_the_node_said(tmp_path: Path) -> None:
    import msgspec

    config = config_in(tmp_path)
    async with serving(config, StillNode()), over_unix(config) as client:
        status = await (await client.get("/v1/status")).json()
        assert msgspec.convert(status["node"], NodeSnapshot) == node_snapshot()
        assert status["ready"] is True
        engines = await (await client.get("/v1/engines")).json()
        assert [engine["engine_id"] for engine in engines["engines"]] == ["decode-0", "<b>odd</b>"]
        peers = await (await client.get("/v1/peers")).json()
        assert peers["peers"][0]["num_grants"] == 7
        transfers = await (await client.get("/v1/transfers")).json()
        assert [len(transfers["transfers"]), len(transfers["pulls"])] == [2, 1]
        history = await (await client.get("/v1/history")).json()
        assert [record_from_json(record) for record in history["records"]] == records()


async def test_a_node_that_is_not_ready_says_why(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with serving(config, StillNode(["nixl cannot be imported"])), over_unix(config) as client:
        async with client.get("/readyz") as answer:
            assert answer.status == 503
            assert await answer.json() == {
                "ready": False,
                "reasons": ["nixl cannot be imported"],
                "warnings": [],
                "active_warnings": [],
            }
        async with client.get("/healthz") as answer:
            assert answer.status == 200
        async with client.get("/v1/status") as answer:
            verdict = (await answer.json())["verdict"]
            text = "Not ready: nixl cannot be imported."
            assert verdict == {"level": "bad", "text": text, "remedy": ""}


async def test_drain_is_never_taken_over_tcp(tmp_path: Path) -> None:
    config, node = config_in(tmp_path), StillNode()
    async with serving(config, node) as server, over_tcp(server) as tcp, over_unix(config) as unix:
        async with tcp.post("/v1/drain") as answer:
            assert answer.status == 403
            assert (await answer.json())["error"]["code"] == "not-allowed"
        assert not node.draining
        async with unix.post("/v1/drain") as answer:
            assert answer.status == 202
        assert node.draining


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
async def test_drain_is_for_root_and_the_daemons_user(tmp_path: Path) -> None:
    config, node = config_in(tmp_path), StillNode()
    async with serving(config, node), over_unix(config) as client:
        # The kernel keeps the credentials of the moment of connect(); so the connection is
        # made as another user, who can reach the socket, and used as root.
        for directory in (tmp_path, *tmp_path.parents):
            if directory.stat().st_uid == os.geteuid() and directory != Path("/"):
                directory.chmod(directory.stat().st_mode | 0o011)
        os.chmod(config.control.socket, 0o666)
        os.seteuid(NOBODY)
        try:
            answer = await client.get("/v1/status")
            answer.release()
        finally:
            os.seteuid(0)
        assert answer.status == 200
        async with client.post("/v1/drain") as answer:
            assert answer.status == 403
            assert f"user {NOBODY}" in (await answer.json())["error"]["message"]
    assert not node.draining


async def test_what_is_not_in_the_table_gets_a_code_and_a_sentence(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with serving(config, StillNode()), over_unix(config) as client:
        async with client.get("/v2/status") as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["code"] == "not-found"
        async with client.get("/v1/drain") as answer:
            assert answer.status == 405
            assert answer.headers["Allow"] == "POST"


async def test_an_error_of_the_daemons_costs_one_answer(tmp_path: Path) -> None:
    class Broken(StillNode):
        def records(self) -> list:  # type: ignore[type-arg]
            raise ValueError("secret")

    config = config_in(tmp_path)
    async with serving(config, Broken()), over_unix(config) as client:
        async with client.get("/v1/history") as answer:
            assert answer.status == 500
            assert "secret" not in await answer.text()
        async with client.get("/v1/status") as answer:
            assert answer.status == 200


async def test_the_control_socket_comes_and_goes(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    path = Path(config.control.socket)
    async with serving(config, StillNode()) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert stat.S_ISSOCK(path.stat().st_mode)
    assert not path.exists()
    assert server.tcp_address is None
    await server.stop()


async def test_a_dead_daemons_socket_is_replaced(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(config.control.socket)
    async with serving(config, StillNode()), over_unix(config) as client, client.get("/healthz") as answer:
        assert answer.status == 200


async def test_a_living_daemons_socket_is_left_to_it(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with serving(config, StillNode()), over_unix(config) as client:
        with pytest.raises(ConfigError, match=f"process {os.getpid()}") as refused:
            async with serving(config, StillNode()):
                pass
        assert refused.value.code is Code.ALREADY_RUNNING
        async with client.get("/healthz") as answer:
            assert answer.status == 200


async def test_tcp_may_be_off(tmp_path: Path) -> None:
    config = config_in(tmp_path, bind="")
    async with serving(config, StillNode()) as server:
        assert server.tcp_address is None


async def test_an_address_that_is_taken_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = config_in(tmp_path, bind=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"http\.bind"):
            async with serving(config, StillNode()):
                pass
    assert not Path(config.control.socket).exists()


async def test_a_file_in_the_sockets_place_is_left_alone(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    Path(config.control.socket).write_text("mine")
    with pytest.raises(ConfigError, match=r"control\.socket"):
        async with serving(config, StillNode()):
            pass
    assert Path(config.control.socket).read_text() == "mine"
