"""`kvxferd top` against a real server on a real socket."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvxferd.cli.top import sparkline
from kvxferd.errors import Code
from kvxferd.ids import EngineId
from kvxferd.telemetry.samples import Samples
from kvxferd.tooling.watch import fit_height
from tests.support.node_samples import StillNode, pull_record
from tests.support.terminal import on_terminal
from tests.support.verb_harness import daemon, run

TEXTS = (
    *("-15 min", "Why pulls failed", "cannot pull (req-0)", "Running pulls", "req-3", "Pairs of engines"),
    *("prefill-0", "1.10 ms", "1.75 s ago", "The slowest pulls", "wire 10 ms, queue 1 ms"),
)


async def test_top_shows_what_fails_first(tmp_path: Path) -> None:
    async with daemon(tmp_path, StillNode()) as config:
        shown = await run("top", "--socket", config.control.socket)
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert lines[0].startswith("tcp://10.0.0.1:9441, version ")
    assert lines[1].startswith("Pulls fail: 1 of 3 failed in the last 20 s (33.3 %), most with lease-expired")
    for text in TEXTS:
        assert text in shown.output, text
    assert "\x1b" not in shown.output


@pytest.mark.parametrize(
    ("values", "span_s", "is_rate", "want", "top"),
    [
        ([0.0] * 90, 10.0, True, "...", 0.0),
        ([None] * 60 + [30.0] * 30, 10.0, True, "  #", 3.0),
        ([10.0] * 30, 10.0, True, "  #", 1.0),  # the daemon is young
        ([8.0] * 30 + [4.0] * 30 + [0.0] * 30, 4.0, True, "#-.", 2.0),  # it ran in a part of each slot
        ([None] * 29 + [5.0] + [1.0] * 30 + [0.0] * 30, 10.0, False, "#-.", 5.0),
    ],
)
def test_sparkline(values: list[float | None], span_s: float, is_rate: bool, want: str, top: float) -> None:
    (slot,) = Samples().report(900).slots
    assert slot is not None
    slots = [
        None if value is None else msgspec.structs.replace(slot, p99_s=value, span_s=span_s)
        for value in values
    ]
    bars, found = sparkline(slots, "p99_s", 3, is_rate=is_rate)
    assert found == top
    assert [char if char in ". " else "#" if char in "█@" else "-" for char in bars] == list(want)
    assert not re.search(r"[\x00-\x1f]", bars)


# --- `--watch`: what is shown again, on a terminal and into a pipe


VERBS = ["status", "engines", "transfers", "peers", "history"]
CLEAR = "\x1b[H\x1b[2J"
OTHER_SCREEN, FIRST_SCREEN = "\x1b[?1049h", "\x1b[?1049l"
DEADLINE_S = 60.0


def _start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvxferd.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


async def _state_is_shown(process: subprocess.Popen[str], text: str) -> None:
    """Wait for a block whose state begins with `text`."""

    def read() -> None:
        assert process.stdout is not None
        assert any(" ".join(line.split()).startswith(f"state {text}") for line in process.stdout)

    await asyncio.wait_for(asyncio.to_thread(read), DEADLINE_S)


@pytest.mark.process
async def test_a_pipe_gets_block_after_block_through_a_restart_of_the_daemon(tmp_path: Path) -> None:
    watching = None
    try:
        async with daemon(tmp_path):
            watching = _start("status", "--watch", "0.1", "--socket", str(tmp_path))
            await _state_is_shown(watching, "Pulls fail: ")
            await _state_is_shown(watching, "Pulls fail: ")
        await asyncio.sleep(0.3)  # some rounds without a daemon
        async with daemon(tmp_path, StillNode(["it has just started"])):
            await _state_is_shown(watching, "Not ready: it has just started.")
            watching.send_signal(signal.SIGINT)
            _, errors = await asyncio.to_thread(watching.communicate, None, DEADLINE_S)
    finally:
        if watching is not None:
            watching.kill()
            watching.wait()
    assert watching.returncode == 0
    assert all(line.startswith("kvxferd: cannot ask the daemon at ") for line in errors.splitlines())
    assert errors.count("\n") <= 2  # one line an outage, not one a round


@pytest.mark.process
async def test_json_is_one_line_a_round_and_a_closed_pipe_ends_it(tmp_path: Path) -> None:
    async with daemon(tmp_path):
        watching = _start("peers", "--json", "--watch", "0.1", "--socket", str(tmp_path))
        try:
            assert watching.stdout is not None
            for _ in range(2):
                line = await asyncio.to_thread(watching.stdout.readline)
                assert "peers" in json.loads(line)
            watching.stdout.close()
            await asyncio.to_thread(watching.wait, DEADLINE_S)
            assert watching.stderr is not None
            assert (watching.returncode, watching.stderr.read()) == (0, "")
        finally:
            watching.kill()
            watching.wait()
            if watching.stderr is not None:
                watching.stderr.close()


@pytest.mark.process
async def test_a_terminal_is_redrawn(tmp_path: Path) -> None:
    node = StillNode()

    def watch_until_interrupted() -> tuple[int, str]:
        with on_terminal(["status", "--watch", "0.1", "--socket", str(tmp_path)], columns=80) as terminal:
            terminal.read_until(CLEAR, count=3)
            return terminal.interrupt(), terminal.written

    async with daemon(tmp_path, node):
        status, written = await asyncio.to_thread(watch_until_interrupted)
    assert status == 0
    first, *rounds = written.split(CLEAR)
    assert first == OTHER_SCREEN
    assert written.endswith(FIRST_SCREEN)
    assert len(rounds) >= 3
    assert rounds[0].startswith("kvxferd status, every 0.1 s: ")
    assert "Traceback" not in written
    assert "Aborted" not in written


@pytest.mark.process
async def test_q_ends_it(tmp_path: Path) -> None:
    def watch_until_q() -> tuple[int, str]:
        with on_terminal(["top", "--interval", "60", "--socket", str(tmp_path)], columns=80) as terminal:
            terminal.read_until("Pairs of engines")
            terminal.type("q")
            written = terminal.read_to_end()
            return terminal.process.returncode, written

    async with daemon(tmp_path):
        status, written = await asyncio.to_thread(watch_until_q)
    assert status == 0
    assert written.endswith(FIRST_SCREEN)


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


@pytest.mark.parametrize("verb", VERBS)
async def test_without_a_daemon_at_first_it_is_an_error(tmp_path: Path, verb: str) -> None:
    result = await run(verb, "--watch", "--socket", str(tmp_path))
    assert result.exit_code == 2
    assert "cannot ask the daemon" in result.stderr


async def test_following_is_not_watched(tmp_path: Path) -> None:
    result = await run("history", "--follow", "--watch", "--socket", str(tmp_path))
    assert result.exit_code == 2
    assert "--follow goes on by itself" in result.stderr


@pytest.mark.parametrize("seconds", ["0", "-1", "0.01", "nan", "soon"])
@pytest.mark.parametrize(("verb", "flag"), [("status", "--watch"), ("top", "--interval")])
async def test_an_interval_that_cannot_be(tmp_path: Path, verb: str, flag: str, seconds: str) -> None:
    result = await run(verb, f"{flag}={seconds}", "--socket", str(tmp_path))
    assert result.exit_code == 2
    assert "Error: " in result.stderr


@pytest.mark.parametrize(
    ("text", "columns", "lines", "shown"),
    [
        ("a\nb\n", 10, 3, "a\nb\n"),
        ("a\nb\nc\n", 10, 3, "a\n(2 more lines; a taller terminal shows them)\n"),
        ("a" * 30 + "\nb\n", 10, 4, "(2 more lines; a taller terminal shows them)\n"),
        ("\x1b[1m" + "a" * 10 + "\x1b[0m\nb\n", 10, 3, "\x1b[1m" + "a" * 10 + "\x1b[0m\nb\n"),
        ("\u6f22" * 5 + "\nb\n", 10, 3, "\u6f22" * 5 + "\nb\n"),
        ("\u6f22" * 6 + "\nb\n", 10, 3, "(2 more lines; a taller terminal shows them)\n"),
    ],
)
def test_a_frame_fits_the_terminal(text: str, columns: int, lines: int, shown: str) -> None:
    assert fit_height(text, columns, lines) == shown
