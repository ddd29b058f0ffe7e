"""Tables on terminals of several widths: nothing is cut, and nothing moves the cursor."""

from __future__ import annotations

import asyncio
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.cli.root import root
from kvxferd.errors import Code
from kvxferd.ids import BootId, Endpoint, EngineId, Generation, TransferId
from kvxferd.records import NodeSnapshot, PullRecord, Record
from kvxferd.telemetry.samples import Samples
from kvxferd.tooling.output import share_width
from kvxferd.wire.limits import MAX_NAME_CHARS
from tests.support.node_samples import StillNode, node_snapshot, pull_record
from tests.support.terminal import on_terminal
from tests.support.verb_harness import daemon

VERBS = [["status"], ["engines"], ["engines", "--topology"], ["peers"], ["transfers"], ["history"]]
WIDTHS = [40, 60, 80, 100]
STYLE = re.compile(r"\x1b\[[\d;]*m")

# As long as an id may be: without a place to break, of characters that take two columns, and of what
# moves a cursor, colours text or reverses its direction.
LONG = "x" * (MAX_NAME_CHARS - 2) + "-9"
WIDE = "\u6f22\u5b57" * (MAX_NAME_CHARS // 2)
HOSTILE = ("\x1b[2J\x1b]0;t\x07\r\n\t\x08\x9b1;1H\u202e\u200b[red]" * 10)[:MAX_NAME_CHARS]
KEY = "0123456789abcdef" * 4
ENDPOINT = Endpoint(f"tcp://[fe80:1234:5678:9abc:def0:1234:5678:9abc]:65535#{KEY}")

WANTED = {
    "status": [ENDPOINT, LONG],
    "peers": [ENDPOINT, WIDE],
    "engines": [LONG, WIDE, "boot-a/pp0.tp1"],
    "engines --topology": ["target_remote_ranks=[0, 1]"],
    "history": [LONG, WIDE, "lease-expired", "1.0 MiB"],
    "transfers": [LONG, WIDE, "lease-expired", "1.0 MiB"],
}


class LongNames(StillNode):
    """A node whose ids are as long and as odd as they may be."""

    def snapshot(self) -> NodeSnapshot:
        node = node_snapshot()
        names = (LONG, WIDE, HOSTILE)
        engines = tuple(
            msgspec.structs.replace(node.engines[0], engine_id=EngineId(name), generation=Generation(name))
            for name in names
        )
        return msgspec.structs.replace(
            node,
            endpoint=ENDPOINT,
            boot=BootId(LONG),
            engines=engines,
            peers=(msgspec.structs.replace(node.peers[0], endpoint=ENDPOINT, boot=BootId(WIDE)),),
            transfers=tuple(
                msgspec.structs.replace(
                    node.transfers[0], transfer_id=TransferId(name), engine_id=EngineId(LONG)
                )
                for name in names
            ),
            pulls=tuple(
                msgspec.structs.replace(node.pulls[0], transfer_id=TransferId(name)) for name in names
            ),
        )

    def records(self) -> list[Record]:
        failed = pull_record("failed", Code.LEASE_EXPIRED)
        assert isinstance(failed, PullRecord)
        return [
            msgspec.structs.replace(failed, transfer_id=TransferId(name), message=f"cannot pull {name}")
            for name in (LONG, WIDE, HOSTILE)
        ]


class TerminalText(StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


def run_in_terminal(arguments: list[str], columns: int | None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what a verb prints on a terminal of that width; None: into a pipe."""
    out = StringIO() if columns is None else TerminalText()
    with monkeypatch.context() as patched:
        patched.setenv("COLUMNS", str(columns or 80))
        patched.setenv("TERM", "xterm-256color")
        patched.delenv("NO_COLOR", raising=False)
        with redirect_stdout(out):
            root(arguments, standalone_mode=False)
    return out.getvalue()


@pytest.mark.parametrize("columns", [*WIDTHS, None])
@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
async def test_nothing_is_cut_and_nothing_steers_the_terminal(
    tmp_path: Path, verb: list[str], columns: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemon(tmp_path, LongNames()) as config:
        arguments = [*verb, "--socket", config.control.socket]
        shown = await asyncio.to_thread(run_in_terminal, arguments, columns, monkeypatch)
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    plain = STYLE.sub("", shown)
    assert all(character.isprintable() or character == "\n" for character in plain)
    if columns is None:
        assert plain == shown
        assert not any(line.endswith(" ") for line in shown.splitlines())
    for name in WANTED[" ".join(verb)]:
        assert name in plain, name  # whole, and in one line


class FailingPulls(StillNode):
    """A node whose pulls from one peer fail."""

    @property
    def samples(self) -> Samples:
        found = Samples()
        failed = pull_record("failed", Code.PEER_UNREACHABLE)
        found.add(msgspec.structs.replace(failed, peer=ENDPOINT))
        return found


@pytest.mark.parametrize("verb", [["status"], ["top", "--once"]], ids=" ".join)
async def test_a_command_is_not_broken_into_lines(
    tmp_path: Path, verb: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemon(tmp_path, FailingPulls()) as config:
        arguments = [*verb, "--socket", config.control.socket]
        shown = await asyncio.to_thread(run_in_terminal, arguments, 80, monkeypatch)
    assert f"`kvxferd ping '{ENDPOINT}' --config {FailingPulls.config_path}`" in STYLE.sub("", shown)


@pytest.mark.process
async def test_without_color_there_is_no_escape_sequence(tmp_path: Path) -> None:
    async with daemon(tmp_path) as config:
        arguments = ["transfers", "--socket", config.control.socket]
        written = await asyncio.to_thread(_written_on_terminal, arguments, {"NO_COLOR": "1"})
        coloured = await asyncio.to_thread(_written_on_terminal, arguments, {})
    assert "\x1b" not in written
    assert STYLE.sub("", coloured) == written
    assert STYLE.search(coloured)
    assert max(map(len, written.splitlines())) <= 100


def _written_on_terminal(arguments: list[str], environ: dict[str, str]) -> str:
    with on_terminal(arguments, columns=100, environ=environ) as terminal:
        return terminal.read_to_end()


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=12),
    st.integers(0, 2000),
)
def test_widths_hold_every_word_and_use_the_room(pairs: list[tuple[int, int]], spare: int) -> None:
    least, most = [min(pair) for pair in pairs], [max(pair) for pair in pairs]
    room = sum(least) + spare
    widths = share_width(least, most, room)
    assert all(low <= width <= high for low, width, high in zip(least, widths, most, strict=True))
    assert sum(widths) == min(room, sum(most))


def test_the_narrower_columns_grow_first() -> None:
    assert share_width([2, 2, 5], [4, 90, 100], 20) == [4, 8, 8]
