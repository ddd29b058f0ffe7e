"""An engine that is live: asked of a real server on a real socket."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import msgspec
import pytest

from kvxferd.layout.presets import deploy
from tests.support.verb_harness import daemon, run


async def test_a_live_engine_is_read_as_its_layouts_say(tmp_path: Path) -> None:
    async with daemon(tmp_path) as config:
        result = await run(
            "explain", "@prefill-0", "tiny-dense,tp=1", "--json", "--socket", config.control.socket
        )
    assert result.exit_code == 0, result.output
    (rank,) = json.loads(result.stdout)["ranks"]
    assert [read["source"] for read in rank["reads"]] == [[0, 0], [0, 1]]
    assert rank["num_bytes"] == 4 * 2 * 4 * 16 * 1000


@pytest.mark.parametrize("is_prefill", [True, False])
async def test_a_preset_is_taken_for_the_model_of_an_engine_that_runs(
    tmp_path: Path, is_prefill: bool
) -> None:
    """The fingerprint of vLLM's engine has a digest of the weights, which no preset has."""
    forms = [
        {
            "spec": msgspec.structs.replace(spec, fingerprint="LlamaForCausalLM/bfloat16/plain/0"),
            "layout": made,
        }
        for spec, made in deploy("tiny-dense", tp=2).values()
    ]
    file = tmp_path / "live.json"
    file.write_bytes(msgspec.json.encode({"ranks": forms}))
    pair = (str(file), "tiny-dense") if is_prefill else ("tiny-dense", str(file))
    result = await run("explain", *pair, "--json")
    assert result.exit_code == 0, result.output
    (note,) = json.loads(result.stdout)["notes"]
    assert note.startswith("tiny-dense has no weights here")
    assert note.endswith("LlamaForCausalLM/bfloat16/plain/0")
    refused = await run("explain", str(file), "tiny-mla", "--json")
    assert {one["field"] for one in json.loads(refused.stdout)["refused"]} == {"num_layers", "num_kv_heads"}


async def test_an_engine_that_the_daemon_does_not_know(tmp_path: Path) -> None:
    async with daemon(tmp_path) as config:
        result = await run("explain", "@a/b?c", "tiny-dense", "--socket", config.control.socket)
    assert result.exit_code == 2
    assert "cannot tell of engine 'a/b?c'" in result.stderr
    assert result.stderr.endswith("[engine-unknown]\n")


async def test_what_the_daemon_answers_is_a_file_that_explain_takes(tmp_path: Path) -> None:
    async with daemon(tmp_path) as config:
        connector = aiohttp.UnixConnector(path=config.control.socket)
        async with aiohttp.ClientSession("http://kvxferd", connector=connector) as client:
            reply = await client.get("/v1/engines/prefill-0/layouts")
            body = await reply.read()
            assert (await client.get("/v1/engines/nobody/layouts")).status == 404
    file = tmp_path / "engine.json"
    file.write_bytes(body)
    result = await run("explain", str(file), "tiny-dense")
    assert result.exit_code == 0, result.output
