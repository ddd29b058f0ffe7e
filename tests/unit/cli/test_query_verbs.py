"""The verbs that ask a daemon: against a real server on a real socket."""

import asyncio
import json
import socket
from pathlib import Path

import pytest

from tests.support.node_samples import StillNode
from tests.support.verb_harness import daemon, run

TABLES = ["status", "engines", "peers", "transfers"]


@pytest.mark.parametrize(
    ("verb", "shown"),
    [
        (
            "status",
            [
                "tcp://10.0.0.1:9441",
                "ready",
                "2, 1 readable",
                "9.0 MiB",
                "1 running, 4 quarantined",
                "1: 1 for readers; 4 pulls in doubt",
                "2 recorded, 1 without ranks here; 2 ranks kept",
            ],
        ),
        (
            "engines",
            ["decode-0", "pp0.tp1", "lacks pp1.tp0", "3.0 MiB", "0-15", "gone-0", "312.0 s", "readers"],
        ),
        ("peers", ["tcp://10.0.0.2:9441", "up", "prefill-0@g7 (8 ranks)"]),
        ("transfers", ["req-1", "granted", "req-3", "wire", "12.5 s"]),
    ],
)
async def test_a_verb_shows_a_table(tmp_path: Path, verb: str, shown: list[str]) -> None:
    async with daemon(tmp_path) as config:
        result = await run(verb, "--socket", config.control.socket)
    assert result.exit_code == 0, result.output
    for text in shown:
        assert text in result.stdout


@pytest.mark.parametrize("verb", TABLES)
async def test_json_is_one_object(tmp_path: Path, verb: str) -> None:
    async with daemon(tmp_path) as config:
        result = await run(verb, "--json", "--socket", config.control.socket)
    assert isinstance(json.loads(result.stdout), dict)


async def test_the_socket_comes_from_the_same_settings_as_the_daemons(tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text(f'[node]\nrun_dir = "{tmp_path}"\n')
    async with daemon(tmp_path):
        by_file = await run("status", "--config", str(file))
        by_environment = await run("status", environ={"KVXFERD_NODE_RUN_DIR": str(tmp_path)})
    assert by_file.exit_code == by_environment.exit_code == 0


async def test_a_node_that_is_not_ready_says_why(tmp_path: Path) -> None:
    async with daemon(tmp_path, StillNode(["nixl cannot be imported"])) as config:
        result = await run("status", "--socket", config.control.socket)
    assert "not ready: nixl cannot be imported" in result.stdout


async def test_drain(tmp_path: Path) -> None:
    node = StillNode()
    async with daemon(tmp_path, node) as config:
        result = await run("drain", "--socket", config.control.socket)
        assert result.exit_code == 0
        assert node.draining
        assert "draining" in (await run("status", "--socket", config.control.socket)).stdout


@pytest.mark.parametrize("verb", [*TABLES, "drain"])
async def test_without_a_daemon_a_sentence_says_what_to_do(tmp_path: Path, verb: str) -> None:
    result = await run(verb, "--socket", str(tmp_path / "control.sock"))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("kvxferd: cannot ask the daemon at ")
    assert "kvxferd serve" in result.stderr
    assert result.stderr.endswith("[daemon-lost]\n")
    assert result.stderr.count("\n") == 1


async def test_a_server_that_speaks_something_else(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 smtp ready\r\n")
        writer.close()

    async with await asyncio.start_unix_server(answer, path):
        result = await run("status", "--socket", str(path))
    assert result.exit_code == 2
    assert result.stderr.startswith("kvxferd: cannot ask")


async def test_a_dead_daemons_socket(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert "no daemon is there" in (await run("status", "--socket", str(path))).stderr
