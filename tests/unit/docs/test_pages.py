"""What the documents name is there: commands, options, routes, settings, metrics, events and codes."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import pytest
from click.testing import CliRunner

from docs.tools import surfaces
from docs.tools.check_pages import anchors_of, documents
from kvxferd import client
from kvxferd.cli.root import root
from kvxferd.config import SETTINGS
from kvxferd.control.http_routes import ROUTES
from kvxferd.errors import Code, KvxferdError
from kvxferd.integrations.vllm.options import Options, read_options
from kvxferd.telemetry.warnings import WarningKind
from tests.support.documented_commands import Command, blocks_of, commands_of
from tests.support.repository import ROOT, files_in, text_of

TRANSFER_CONFIG = {"kv_connector", "kv_connector_module_path", "kv_role", "kv_load_failure_policy"}
SECTIONS = "|".join(sorted({key.partition(".")[0] for key in SETTINGS}))


def pages() -> list[Any]:
    """Return the documents, for a test of each."""
    return [pytest.param(page, id=page.relative_to(ROOT).as_posix()) for page in documents()]


@pytest.mark.parametrize("page", pages())
def test_what_a_page_names_is_there(page: Path) -> None:
    assert list(faults(page)) == []


def faults(page: Path) -> Iterator[str]:
    """Yield what a page names and is not there, a line each."""
    text = page.read_text()
    # Files of the run directory have names like keys.
    settings = set(re.findall(rf"`((?:{SECTIONS})\.\w+)`", text)) - {"worker.sock", "control.sock"}
    yield from (f"no setting {name}" for name in sorted(settings - SETTINGS.keys()))
    metrics = set(re.findall(r"`(?:vllm:)?(kvxferd_\w+)`", text))
    yield from (f"no metric {name}" for name in sorted(metrics - metric_names()))
    for command in commands_of(page):
        if check := CHECKS.get(command.program):
            yield from (f"{' '.join(command.words)}: {fault}" for fault in check(command))
        for flag, value in zip(command.words, command.words[1:], strict=False):
            if flag == "--kv-transfer-config":
                yield from transfer_config_faults(json.loads(value))


@cache
def metric_names() -> set[str]:
    """Return the names of the daemon's metrics and series, and of the connector's."""
    families = surfaces.daemon_metrics()
    series = {name for family in families.values() for name in family.series}
    return {*families, *series, *(name.removeprefix("vllm:") for name in surfaces.connector_metrics())}


def verb_faults(command: Command) -> Iterator[str]:
    """Parse a command as the command line does. An explanation that needs no daemon and no file runs, too."""
    verb = root.get_command(click.Context(root), command.words[1])
    if verb is None:
        yield "no such verb"
        return
    try:
        context = verb.make_context(command.words[1], command.arguments[1:])
        if isinstance(verb, click.Group):
            name, inner, rest = verb.resolve_command(context, [*context._protected_args, *context.args])
            assert inner is not None
            inner.make_context(name, rest, parent=context)
    except click.ClickException as error:
        yield error.message
    if command.words[1] == "explain" and not any(w.startswith("@") for w in command.words):
        done = CliRunner().invoke(root, command.arguments)
        yield from [done.output] * (done.exit_code != 0)


def route_faults(command: Command) -> Iterator[str]:
    """Look for the daemon's route of an address."""
    (url,) = [urlsplit(word) for word in command.words if word.startswith("http")]
    method = "POST" if "POST" in command.words else "GET"
    patterns = [re.sub(r"\{\w+\}", "[^/]+", route.path) for route in ROUTES if route.method == method]
    is_of_daemon = url.port not in (8000, 8100, 8200)  # a router's or an engine's
    if is_of_daemon and not any(re.fullmatch(pattern, url.path) for pattern in patterns):
        yield f"no route {method} {url.path}"


def extra_faults(command: Command) -> Iterator[str]:
    """Look for the extras of a package."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for found in re.findall(r"\[(.+?)\]", " ".join(command.words)) for name in found.split(",")}
    yield from (f"no extra {name}" for name in sorted(named - extras.keys()))


def router_faults(command: Command) -> Iterator[str]:
    """Parse the arguments of the router."""
    if "examples/pd_router.py" in command.words:
        spec = importlib.util.spec_from_file_location("pd_router", ROOT / "examples" / "pd_router.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        try:
            module.make_parser().parse_args(command.arguments[1:])
        except SystemExit:
            yield "the router has no such options"


CHECKS: dict[str, Callable[[Command], Iterator[str]]] = {
    "kvxferd": verb_faults,
    "curl": route_faults,
    "pip": extra_faults,
    "python": router_faults,
    "python3": router_faults,
}


def transfer_config_faults(config: dict[str, Any]) -> Iterator[str]:
    """Look at a value of vLLM's `--kv-transfer-config`."""
    try:
        read_options(config.pop("kv_connector_extra_config", {}))
    except KvxferdError as error:
        yield error.message
    yield from (f"no key {name}" for name in sorted(config.keys() - TRANSFER_CONFIG))
    wanted = ("KvxferdConnector", "kvxferd.integrations.vllm")
    if (config["kv_connector"], config["kv_connector_module_path"]) != wanted:
        yield "not our connector"
    if config["kv_role"] not in ("kv_producer", "kv_consumer", "kv_both"):
        yield "no such role"
    if config.get("kv_load_failure_policy", "fail") not in ("fail", "recompute"):
        yield "no such policy"


def test_events_and_codes_of_the_guides_tables_are_there() -> None:
    events = {line.event for line in (*surfaces.event_lines(), *surfaces.record_lines())}
    assert named_in_first_column("monitor.md", "| event | meaning |") <= events
    codes = {code.value for code in Code}
    assert named_in_first_column("when-something-is-wrong.md", "| code of a failed pull |") <= codes


def named_in_first_column(guide: str, head: str) -> set[str]:
    """Return the code spans in the first cells of the table with that head."""
    table = (ROOT / "docs" / "how-to" / guide).read_text().partition(head)[2].partition("\n\n")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    assert cells
    return {name for cell in cells for name in re.findall("`(.+?)`", cell)}


def test_what_the_code_points_at_is_there() -> None:
    named = {kind.page for kind in WarningKind}
    for path in (*files_in("kvxferd"), *files_in("deploy")):
        named |= set(re.findall(r"docs/[\w/-]+\.md(?:#[\w-]+)?", text_of(path)))
    assert len(named) > 20
    for page, _, anchor in (pointer.partition("#") for pointer in sorted(named)):
        assert not anchor or anchor in anchors_of(ROOT / page), f"{page}#{anchor}"
        assert (ROOT / page).is_file(), page


def test_settings_in_blocks_are_accepted(tmp_path: Path) -> None:
    pages = sorted((ROOT / "docs" / "how-to").glob("*.md"))
    blocks = [(page.name, block) for page in pages for block in blocks_of(page, "toml")]
    path = tmp_path / "kvxferd.toml"
    assert blocks
    for name, block in blocks:
        path.write_text(block)
        done = CliRunner().invoke(root, ["config", "check", str(path)])
        assert (done.exit_code, done.output) == (0, f"{path}: valid\n"), name


def test_names_in_the_table_of_where_to_look_are_in_its_files() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("| question | file |")[2].partition("\n\n")[0]
    missing = []
    for row in table.splitlines()[2:]:
        spans = re.findall(r"`([^`]+)`", row)
        text = "".join((ROOT / span).read_text() for span in spans if "/" in span)
        missing += [span for span in spans if "/" not in span and not re.search(rf"\b{span}\b", text)]
    assert table
    assert missing == []


def test_events_that_the_concepts_name_are_the_clients() -> None:
    events = set(re.findall(r"`([A-Z][a-z]+)`", (ROOT / "docs" / "concepts.md").read_text()))
    assert events
    assert [name for name in sorted(events) if not hasattr(client, name)] == []


def test_options_that_the_vllm_pages_name_are_there() -> None:
    """As JSON keys in the text, such as `"num_readers": 2`, or with a word: `"placement": "child"`."""
    for name in ("vllm.md", "vllm-gpu.md"):
        text = (ROOT / "docs" / "how-to" / name).read_text()
        keys = set(re.findall(r'`"(\w+)"(?::[^`]*)?`', text))
        assert keys <= {*Options.__struct_fields__, *TRANSFER_CONFIG}, name
        for key, word in re.findall(r'`"(\w+)": "(\w+)"`', text):
            assert key in TRANSFER_CONFIG or getattr(read_options({key: word}), key) == word, name


# --- figures of docs/how-to/vllm-gpu.md are those of the code


@cache
def bytes_of(model: str, tp: int) -> dict[str, Any]:
    """Return what `kvxferd explain` reports of two equal engines over a card of 400 Gbit/s."""
    engine = f"{model},tp={tp}"
    done = CliRunner().invoke(root, ["explain", engine, engine, "--link", "400g", "--json"])
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def test_bytes_of_a_token() -> None:
    text = (ROOT / "docs" / "how-to" / "vllm-gpu.md").read_text()
    rows = re.findall(r"^\| (`[\w.-]+` \| [\d,]+ \|.*) \|$", text, re.MULTILINE)
    assert rows
    for row in rows:
        model, of_token, of_rank, rate, time = (cell.strip(" `") for cell in row.split("|"))
        found = bytes_of(model, 4)
        (for_rank,) = {rank["num_bytes"] for rank in found["ranks"]}
        assert int(of_token.replace(",", "")) * 1000 == found["num_bytes"], model
        assert int(of_rank.replace(",", "")) * 1000 == for_rank, model
        assert rate == f"{10_000 * found['num_bytes'] / 1000 / 1e9:.2f} GB/s"
        assert time == f"{1000 * found['ranks'][0]['predicted_s']:.1f} ms"
    at_tp_8 = bytes_of("deepseek-v3", 8)["num_bytes"] // 1000
    assert f"at TP 8 a token costs {at_tp_8:,} bytes" in " ".join(text.split())
