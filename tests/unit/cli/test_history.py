"""`kvxferd history`: filters, times, and in which way and how early a pull was read."""

import asyncio
import json
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from kvxferd.cli.history import Duration, format_handover, format_ways
from kvxferd.cli.root import root
from kvxferd.ids import TransferId
from kvxferd.telemetry.history import History
from kvxferd.tooling.control_client import ControlClient
from tests.support.node_samples import StillNode, pull_record
from tests.support.verb_harness import daemon, run


async def test_filters_are_the_servers(socket: tuple[str, str]) -> None:
    failed = json.loads((await run("history", "--failed", "--json", *socket)).stdout)
    assert [one["code"] for one in failed["records"]] == ["lease-expired"]
    released = json.loads((await run("history", "--transfer", "req-5", "--json", *socket)).stdout)
    assert [one["readers"][0]["bytes"] for one in released["records"]] == [5 << 20]
    none = json.loads((await run("history", "--slower", "100ms", "--json", *socket)).stdout)
    assert none["records"] == []
    one = json.loads((await run("history", "--engine", "decode-0", "--limit", "1", "--json", *socket)).stdout)
    assert [record["kind"] for record in one["records"]] == ["release"]
    assert "History: none" in (await run("history", "--transfer", "x" * 300, *socket)).stdout


@pytest.mark.parametrize("query", ["slower=nan", "limit=0", "limit=9999", "failed=maybe", "nothing=1",
                                   "kind=" + "," * 4000])  # fmt: skip
async def test_odd_filters_get_a_code_and_a_sentence(socket: tuple[str, str], query: str) -> None:
    control = ControlClient(socket[1])
    status, reply = await asyncio.to_thread(control.request, "GET", f"/v1/history?{query}")
    assert (status, reply["error"]["code"]) == (400, "bad-request")
    assert reply["error"]["message"].startswith("cannot search the history: ")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("100ms", 0.1), ("2s", 2.0), ("1.5", 1.5), ("250us", 250e-6), ("1m", 60), ("2h", 7200)],
)
def test_durations(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "fast", "-1s", "nan", "1d", "1e3"])
def test_odd_durations_are_refused(text: str) -> None:
    result = CliRunner().invoke(root, ["history", "--slower", text])
    assert result.exit_code == 2
    assert "is no duration" in result.output


@pytest.mark.parametrize(
    ("ways", "shown"),
    [
        ({"direct": 0, "covering": 0}, None),
        ({"direct": 5, "covering": 0}, "direct"),
        ({"direct": 1, "covering": 3}, "75% covering, 25% direct"),
    ],
)
def test_ways_in_words(ways: dict[str, int], shown: str | None) -> None:
    assert format_ways(ways) == shown


class NodeWithPulls(StillNode):
    """A node whose history a test writes."""

    def __init__(self) -> None:
        super().__init__()
        self._history = History(max_records=9)

    @property
    def history(self) -> History:
        return self._history

    def add(self, name: str, **facts: object) -> None:
        """Add a pull of a transfer of that name."""
        record = msgspec.structs.replace(pull_record(), transfer_id=TransferId(name), **facts)
        self._history.add(record)


EARLY = {"progressive": True, "hidden_bytes": 3 << 18, "handover_s": 0.004}


async def test_a_progressive_pull_has_a_line_of_its_handover(tmp_path: Path) -> None:
    node = NodeWithPulls()
    node.add("plain")
    node.add("chunks", **EARLY)
    async with daemon(tmp_path, node) as config:
        shown = (await run("history", "--socket", config.control.socket)).stdout
    _, _, plain, chunks, handover = shown.splitlines()
    assert "plain" in plain
    assert "chunks" in chunks
    assert handover == "    handover 4 ms, 786 kB (75%) hidden"
    assert format_handover(pull_record()) == "-"
    nothing = msgspec.structs.replace(pull_record(), **EARLY | {"bytes": 0, "hidden_bytes": 0})
    assert format_handover(nothing).endswith("(0%) hidden")


async def test_what_ended_a_while_ago_in_utc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    node, now = NodeWithPulls(), time.time()
    for name, ago_s in (("hour", 3600.0), ("minute", 60.0), ("now", 0.0)):
        node.add(name, ended_at=now - ago_s)
    async with daemon(tmp_path, node) as config:
        socket = ("--socket", config.control.socket)
        recent = json.loads((await run("history", "--since", "10m", "--json", *socket)).stdout)
        shown = (await run("history", "--since", "30s", *socket)).stdout.splitlines()
    monkeypatch.undo()
    time.tzset()
    assert [one["transfer_id"] for one in recent["records"]] == ["minute", "now"]
    assert len(shown) == 3
    clock = datetime.fromtimestamp(now, UTC)
    assert shown[2].startswith(f"{clock:%H:%M:%S}.{int(now * 1000) % 1000:03d}Z  pull")
    assert "now" in shown[2]
