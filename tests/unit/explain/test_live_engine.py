"""An engine that is live: asked of a real server on a real socket."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
from click.testing import CliRunner, Result

from kvxferd.cli.root import root
from kvxferd.config import Config, load_config
from kvxferd.control.http_server import HttpServer
from kvxferd.telemetry.metrics import Metrics
from tests.support.node_samples import StillNode


async def explain(config: Config, *arguments: str) -> Result:
    """Run the verb in a thread, while the server is served in this one."""
    node = StillNode()
    server = HttpServer(config, node, Metrics(node.snapshot))
    await server.start()
    try:
        command = ["explain", *arguments, "--socket", config.control.socket]
        return await asyncio.to_thread(CliRunner().invoke, root, command)
    finally:
        await server.stop()


def config_in(run_dir: Path) -> Config:
    """A configuration whose sockets lie in that directory."""
    return load_config(None, {}, {"node.run_dir": str(run_dir), "http.bind": ""})


async def test_a_live_engine_is_read_as_its_layouts_say(tmp_path: Path) -> None:
    result = await explain(config_in(tmp_path), "@prefill-0", "tiny-dense,tp=1", "--json")
    assert result.exit_code == 0, result.output
    (rank,) = json.loads(result.stdout)["ranks"]
    assert [read["prefill_rank"] for read in rank["reads"]] == [[0, 0], [0, 1]]
    assert rank["bytes_per_1000_tokens"] == 4 * 2 * 4 * 16 * 1000


async def test_a_live_engine_may_be_refused(tmp_path: Path) -> None:
    result = await explain(config_in(tmp_path), "llama-3-8b", "@prefill-0")
    assert result.exit_code == 1


async def test_an_engine_that_the_daemon_does_not_know(tmp_path: Path) -> None:
    result = await explain(config_in(tmp_path), "@a/b?c", "tiny-dense")
    assert result.exit_code == 2
    assert "cannot tell of engine 'a/b?c'" in result.stderr
    assert result.stderr.endswith("[engine-unknown]\n")


async def test_without_a_daemon(tmp_path: Path) -> None:
    command = ["explain", "@x", "tiny-dense", "--socket", str(tmp_path / "control.sock")]
    result = await asyncio.to_thread(CliRunner().invoke, root, command)
    assert result.exit_code == 2
    assert "kvxferd serve" in result.stderr


async def test_what_the_daemon_answers_is_a_file_that_explain_takes(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    node = StillNode()
    server = HttpServer(config, node, Metrics(node.snapshot))
    await server.start()
    try:
        connector = aiohttp.UnixConnector(path=config.control.socket)
        async with aiohttp.ClientSession("http://kvxferd", connector=connector) as client:
            answer = await client.get("/v1/engines/prefill-0/layouts")
            body = await answer.read()
            assert (await client.get("/v1/engines/nobody/layouts")).status == 404
    finally:
        await server.stop()
    file = tmp_path / "engine.json"
    file.write_bytes(body)
    result = CliRunner().invoke(root, ["explain", str(file), "tiny-dense"])
    assert result.exit_code == 0, result.output
