"""`kvxferd history`: filters, times, and the line of a progressive pull."""

import asyncio
import json
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from kvxferd.cli.history import Duration
from kvxferd.cli.root import root
from kvxferd.errors import Code
from kvxferd.ids import TransferId
from kvxferd.records import Record
from kvxferd.telemetry.history import History
from kvxferd.tooling.control_client import ControlClient
from tests.support.node_samples import StillNode, pull_record
from tests.support.verb_harness import daemon, run


class BusyNode(StillNode):
    """A node with a history of two records, to which a test adds."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = History(max_records=2, boot="b")

    @property
    def history(self) -> History:
        """What is left of it."""
        return self.kept


async def test_filters_are_the_servers(tmp_path: Path) -> None:
    async with daemon(tmp_path) as config:
        socket = ("--socket", config.control.socket, "--json")
        failed = json.loads((await run("history", "--failed", *socket)).stdout)
        assert [one["code"] for one in failed["records"]] == ["lease-expired"]
        released = json.loads((await run("history", "--transfer", "req-5", *socket)).stdout)
        assert [one["readers"][0]["bytes"] for one in released["records"]] == [5 << 20]
        none = json.loads((await run("history", "--slower", "100ms", *socket)).stdout)
        assert (none["records"], none["dropped"]) == ([], 0)
        one = json.loads((await run("history", "--engine", "decode-0", "--limit", "1", *socket)).stdout)
        assert [record["kind"] for record in one["records"]] == ["release"]
        nothing = await run("history", "--transfer", "x" * 300, *socket[:2])
        assert "History: none" in nothing.stdout


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("100ms", 0.1), ("2s", 2.0), ("1.5", 1.5), ("250us", 250e-6), ("1m", 60.0), ("2h", 7200.0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "fast", "-1s", "nan", "1d", "1e3"])
def test_odd_durations_are_refused(text: str) -> None:
    result = CliRunner().invoke(root, ["history", "--slower", text])
    assert result.exit_code == 2
    assert "is no duration" in result.output


async def test_a_progressive_pull_has_a_line_of_its_handover(tmp_path: Path) -> None:
    node = BusyNode()
    node.kept.add(named("plain"))
    more = {"progressive": True, "hidden_bytes": 3 << 18, "handover_s": 0.004}
    node.kept.add(msgspec.structs.replace(named("chunks"), **more))
    async with daemon(tmp_path, node) as config:
        shown = (await run("history", "--socket", config.control.socket)).stdout
    _, _, plain, chunks, handover = shown.splitlines()
    assert "plain" in plain
    assert "chunks" in chunks
    assert handover == "    handover 4 ms, 786 kB (75%) hidden"


def named(name: str, code: Code | None = None) -> Record:
    """A pull of that transfer."""
    record = pull_record("failed" if code else "delivered", code)
    return msgspec.structs.replace(record, transfer_id=TransferId(name))


async def test_what_ended_a_while_ago_in_utc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    node, now = BusyNode(), time.time()
    node.kept = History(max_records=9, boot="b")
    for name, ago_s in (("hour", 3600.0), ("minute", 60.0), ("now", 0.0)):
        node.kept.add(msgspec.structs.replace(named(name), ended_at=now - ago_s))
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


async def test_odd_filters_get_a_code_and_a_sentence(tmp_path: Path) -> None:
    async with daemon(tmp_path) as config:
        control = ControlClient(config.control.socket)
        for query in (
            "slower=nan",
            "limit=0",
            "limit=9999",
            "failed=maybe",
            "nothing=1",
            "after=x",
            "kind=" + "," * 4000,
        ):
            status, reply = await asyncio.to_thread(control.request, "GET", f"/v1/history?{query}")
            assert status == 400, query
            assert reply["error"]["code"] == "bad-request"
            assert reply["error"]["message"].startswith("cannot search the history: ")
