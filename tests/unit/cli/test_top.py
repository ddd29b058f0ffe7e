"""`kvxferd top` against a real server on a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvxferd.errors import Code
from kvxferd.ids import EngineId
from kvxferd.telemetry.samples import Samples
from tests.support.node_samples import StillNode, pull_record
from tests.support.terminal import Terminal, on_terminal
from tests.support.verb_harness import daemon, run


async def test_top_shows_what_fails_first(socket: tuple[str, str]) -> None:
    shown = await run("top", *socket)
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert lines[0].startswith("tcp://10.0.0.1:9441, version ")
    assert lines[1].startswith("Pulls fail: 1 of 3 failed in the last 20 s (33.3 %), most with lease-expired")
    parts = (
        "Why pulls failed",
        "cannot pull (req-0)",
        "Running pulls",
        "req-3",
        "Pairs of engines",
        "prefill-0",
    )
    for text in parts:
        assert text in shown.output, text
    assert "\x1b" not in shown.output
    assert isinstance(json.loads((await run("top", "--json", *socket)).stdout), dict)


CLEAR = "\x1b[H\x1b[2J"
FIRST_SCREEN = "\x1b[?1049l"


@pytest.mark.process
@pytest.mark.parametrize("end", [lambda shown: shown.type("q"), Terminal.interrupt], ids=["q", "Ctrl-C"])
async def test_a_terminal_is_redrawn_until_a_key_through_a_restart_of_the_daemon(
    tmp_path: Path, end: Callable[[Terminal], object]
) -> None:
    with on_terminal(["top", "--interval", "1", "--socket", str(tmp_path)], columns=80) as terminal:
        async with daemon(tmp_path):
            await asyncio.to_thread(terminal.read_until, "Pairs of engines", 2)
        await asyncio.to_thread(terminal.read_until, "; trying again")
        await asyncio.to_thread(end, terminal)
        written = await asyncio.to_thread(terminal.read_to_end)
    assert terminal.process.returncode == 0
    assert written.count(CLEAR) >= 3
    assert written.endswith(FIRST_SCREEN)
    assert "Traceback" not in written


class BusyPairs(StillNode):
    """A node with ten pairs of engines: one that is read, and nine whose first pull failed."""

    @property
    def samples(self) -> Samples:
        found = Samples()
        for number in range(9):
            failed = pull_record("failed", Code.PEER_UNREACHABLE)
            found.add(msgspec.structs.replace(failed, source=EngineId(f"gone-{number}")))
        found.add(pull_record())
        return found


async def test_pairs_that_are_read_come_first_and_those_left_out_are_counted(tmp_path: Path) -> None:
    async with daemon(tmp_path, BusyPairs()) as config:
        shown = (await run("top", "--socket", config.control.socket)).output
    pairs = shown.partition("Pairs of engines, 15 minutes\n")[2].splitlines()
    assert pairs[1].startswith("prefill-0  decode-0")
    assert pairs[9] == "(and 2 more)"
