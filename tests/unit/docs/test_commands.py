"""Commands, settings and figures in the documents are right, as far as that can be tried here."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import pytest
import yaml
from click.testing import CliRunner

from kvxferd.cli.root import VERBS, root
from kvxferd.config import Config
from kvxferd.control.http_routes import ROUTES
from kvxferd.errors import Code, DeviceError, EngineError
from kvxferd.integrations.vllm.gpu_placement import GpuPlacement, PlacementSearch, placements_for
from kvxferd.integrations.vllm.options import Options, read_options
from tests.support.documented_commands import ROOT, Command, blocks_of, commands_of

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
GPU_PAGE = ROOT / "docs" / "how-to" / "vllm-gpu.md"
EVERY_COMMAND = [command for page in PAGES for command in commands_of(page)]


def of_program(name: str) -> list[Command]:
    return [command for command in EVERY_COMMAND if command.program == name]


def name_of(command: Command) -> str:
    return f"{command.page}: {' '.join(command.words)[:90]}"


# --- kvxferd


def verb_of(command: Command) -> click.Context:
    """Parse a command as the command line does, and run nothing. Raises ClickException."""
    verb = root.get_command(click.Context(root), command.words[1])
    assert verb is not None, f"no verb has the name {command.words[1]!r}"
    context = verb.make_context(command.words[1], command.arguments[1:])
    if isinstance(verb, click.Group):
        name, inner, rest = verb.resolve_command(context, [*context._protected_args, *context.args])
        assert inner is not None
        return inner.make_context(name, rest, parent=context)
    return context


@pytest.mark.parametrize("command", of_program("kvxferd"), ids=name_of)
def test_commands_of_ours_have_verbs_and_options_that_are_there(command: Command) -> None:
    assert command.words[1] in VERBS
    verb_of(command)


@pytest.mark.parametrize("bad", ["kvxferd stats", "kvxferd drain --wiat", "kvxferd explain llama-3-8b"])
def test_a_wrong_command_is_found(bad: str) -> None:
    with pytest.raises((click.ClickException, AssertionError)):
        verb_of(Command("page", tuple(bad.split())))


def explained() -> Iterator[Command]:
    """Yield the how-to pages' commands that need neither a daemon nor a file."""
    for command in of_program("kvxferd"):
        needs_more = [word for word in command.words if word.startswith("@") or word == "--svg"]
        if command.words[1] == "explain" and not needs_more and "how-to" in command.page:
            yield command


@pytest.mark.parametrize("command", list(explained()), ids=name_of)
def test_explanations_can_be_had(command: Command) -> None:
    done = CliRunner().invoke(root, command.arguments)
    assert done.exit_code == 0, done.output


def test_keys_are_made_as_the_gpu_page_makes_them(tmp_path: Path) -> None:
    (made,) = [c for c in commands_of(GPU_PAGE) if c.words[1:2] == ("keygen",)]
    path = tmp_path / "peer.key"
    arguments = [str(path) if word.startswith("/") else word for word in made.arguments]
    done = CliRunner().invoke(root, arguments)
    assert done.exit_code == 0, done.output
    assert path.stat().st_mode & 0o777 == 0o600


# --- other programs


@pytest.mark.parametrize(
    "command", [c for c in EVERY_COMMAND if "examples/pd_router.py" in c.words], ids=name_of
)
def test_the_router_has_these_options(command: Command) -> None:
    path = ROOT / "examples" / "pd_router.py"
    spec = importlib.util.spec_from_file_location("pd_router", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.make_parser().parse_args(command.arguments[1:])


@pytest.mark.parametrize("command", of_program("curl"), ids=name_of)
def test_addresses_of_the_daemon_have_routes(command: Command) -> None:
    (url,) = [urlsplit(word) for word in command.words if word.startswith("http")]
    if url.port in (8000, 8100, 8200):  # a router's or an engine's
        return
    method = "POST" if "POST" in command.words else "GET"
    assert any(route.method == method and matches(route.path, url.path) for route in ROUTES)


def matches(pattern: str, path: str) -> bool:
    return re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", pattern), path) is not None


@pytest.mark.parametrize("command", of_program("pip"), ids=name_of)
def test_packages_have_these_extras(command: Command) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [
        name
        for word in command.words
        for found in re.findall(r"\[(.+?)\]", word)
        for name in found.split(",")
    ]
    assert set(named) <= set(extras)


# --- vLLM

TRANSFER_CONFIG = {"kv_connector", "kv_connector_module_path", "kv_role", "kv_load_failure_policy"}
ROLES = ("kv_producer", "kv_consumer", "kv_both")


def transfer_configs() -> list[Any]:
    """Return every `--kv-transfer-config`, by its page."""
    found = []
    for command in EVERY_COMMAND:
        for flag, value in zip(command.words, command.words[1:], strict=False):
            if flag == "--kv-transfer-config":
                found.append(pytest.param(json.loads(value), id=command.page))
    return found


@pytest.mark.parametrize("config", transfer_configs())
def test_transfer_configs_are_accepted(config: dict[str, Any]) -> None:
    options = config.pop("kv_connector_extra_config", {})
    assert set(config) <= TRANSFER_CONFIG
    assert config["kv_connector"] == "KvxferdConnector"
    assert config["kv_connector_module_path"] == "kvxferd.integrations.vllm"
    assert config["kv_role"] in ROLES
    assert config.get("kv_load_failure_policy", "fail") in ("fail", "recompute")
    read_options(options)


def test_the_options_that_pages_name_are_there() -> None:
    """As JSON keys in the text, such as `"num_readers": 2`."""
    for page in (GPU_PAGE, GPU_PAGE.with_name("vllm.md")):
        keys = re.findall(r'`"(\w+)"(?::[^`]*)?`', page.read_text())
        assert set(keys) <= {*Options.__struct_fields__, *TRANSFER_CONFIG}, page.name


def test_the_placements_of_the_gpu_page_are_those_of_the_setting() -> None:
    section = GPU_PAGE.read_text().partition("\n## Placements\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert rows == [placement.value for placement in GpuPlacement]
    assert read_options({}).gpu_placement == "auto"
    for placement in rows:
        assert f'`"gpu_placement": "{placement}"`' in section
        assert placements_for(read_options({"gpu_placement": placement}).gpu_placement) == (placement,)


def test_the_refusal_that_the_gpu_page_quotes_is_the_connector_s() -> None:
    search = PlacementSearch("rank (0, 0) of e", "resident")
    with pytest.raises(EngineError, match="no placement of its GPU memory works"):
        search.fail(DeviceError("no driver", Code.DEVICE_UNAVAILABLE))
    assert "`no placement of its GPU memory works`" in GPU_PAGE.read_text()


# --- files


def toml_blocks() -> list[Any]:
    """Return the blocks of settings of every how-to page."""
    pages = sorted((ROOT / "docs" / "how-to").glob("*.md"))
    return [
        pytest.param(block, id=f"{page.name}-{number}")
        for page in pages
        for number, block in enumerate(blocks_of(page, "toml"))
    ]


@pytest.mark.parametrize("block", toml_blocks())
def test_settings_are_accepted(block: str, tmp_path: Path) -> None:
    path = tmp_path / "kvxferd.toml"
    path.write_text(block)
    done = CliRunner().invoke(root, ["config", "check", str(path)])
    assert (done.exit_code, done.output) == (0, f"{path}: valid\n")


def test_the_gpu_page_sets_the_lease_that_it_calculates() -> None:
    (block,) = blocks_of(GPU_PAGE, "toml")
    (container,) = yaml.safe_load(blocks_of(GPU_PAGE, "yaml")[0])["spec"]["containers"]
    assert tomllib.loads(block)["transfer"]["lease_s"] == LEASE_S
    assert container["resources"]["limits"] == {"rdma/hca": "1"}
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]


# --- figures of the GPU page

LEASE_S = 60
TEXT = " ".join(GPU_PAGE.read_text().split())


@cache
def bytes_of(model: str, tp: int) -> dict[str, Any]:
    """Return what `kvxferd explain` reports of two equal engines over a card of 400 Gbit/s."""
    engine = f"{model},tp={tp}"
    done = CliRunner().invoke(root, ["explain", engine, engine, "--link", "400g", "--json"])
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def sizing_rows() -> list[list[str]]:
    rows = re.findall(r"^\| (`[\w.-]+` \| [\d,]+ \|.*) \|$", GPU_PAGE.read_text(), re.MULTILINE)
    assert rows
    return [[cell.strip(" `") for cell in row.split("|")] for row in rows]


@pytest.mark.parametrize("row", sizing_rows(), ids=lambda row: row[0])
def test_bytes_of_a_token(row: list[str]) -> None:
    model, of_token, of_rank, rate, time = row
    found = bytes_of(model, 4)
    (for_rank,) = {rank["bytes_per_1000_tokens"] for rank in found["ranks"]}
    reads = found["ranks"][0]["reads"]
    assert int(of_token.replace(",", "")) * 1000 == found["bytes_per_1000_tokens"]
    assert int(of_rank.replace(",", "")) * 1000 == for_rank
    assert rate == f"{10_000 * found['bytes_per_1000_tokens'] / 1000 / 1e9:.2f} GB/s"
    assert time == f"{sum(read['predicted_ms'] for read in reads):.1f} ms"


def test_bytes_by_hand() -> None:
    """Layers, keys and values, heads, head size, bytes; a latent of 512 + 64 on each of four ranks."""
    by_hand = {
        "llama-3-8b": 32 * 2 * 8 * 128 * 2,
        "llama-3-70b": 80 * 2 * 8 * 128 * 2,
        "deepseek-v3": 61 * (512 + 64) * 2 * 4,
    }
    assert {row[0]: int(row[1].replace(",", "")) for row in sizing_rows()} == by_hand
    assert (
        f"at TP 8 a token costs {bytes_of('deepseek-v3', 8)['bytes_per_1000_tokens'] // 1000:,} bytes" in TEXT
    )


def test_the_lease_and_what_it_may_hold() -> None:
    waiting, rate, tokens = 60, 2, 4096
    assert f"{waiting} waiting at {rate} a second take {waiting // rate} s" in TEXT
    assert Config().transfer.lease_s == waiting / rate
    lost = round(rate * LEASE_S / 10)
    held = lost * tokens * bytes_of("llama-3-70b", 4)["bytes_per_1000_tokens"] // 1000
    assert f"one lost in ten at {rate} a second and {LEASE_S} s, are {lost} requests and" in TEXT
    assert f"{held / 1e9:.1f} GB, {held / 4 / 1e9:.1f} GB a rank" in TEXT


def test_limits() -> None:
    limits = Config().limits
    a_second = limits.max_transfers_per_engine // LEASE_S
    assert (
        f"`limits.max_transfers_per_engine` {limits.max_transfers_per_engine:,} is {a_second} requests"
        in TEXT
    )
    assert f"`limits.max_ranks` {limits.max_ranks} is {limits.max_ranks // 8} a GPU of eight" in TEXT


def test_room_for_a_context() -> None:
    left = 80 * 1024 * (1 - 0.99)
    assert f"`--gpu-memory-utilization 0.99` of 80 GiB leaves {left:.0f} MiB" in TEXT
    assert 500 + 16 + 2 < left < 2 * 500


def test_the_gpu_page_names_what_it_did_not_run() -> None:
    """Every program of the page is run by a test here, or named in its last section."""
    section = GPU_PAGE.read_text().partition("\n## Where this ends\n")[2]
    not_run = set(re.findall("`([^`]+)`", re.findall(r"do not run: (.*?)\n\*", section, re.DOTALL)[0]))
    run_here = {"kvxferd", "curl", "python3"}  # python3: the router above, and `-m venv`
    plain = {"grep"}
    found = {command.program for command in commands_of(GPU_PAGE)}
    assert found - run_here - plain == not_run
