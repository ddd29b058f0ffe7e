"""Tables on terminals of several widths: nothing is cut, and nothing moves the cursor."""

from __future__ import annotations

import asyncio
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvxferd.cli.root import root
from kvxferd.errors import Code
from kvxferd.ids import BootId, Endpoint, EngineId, Generation, TransferId
from kvxferd.records import NodeSnapshot, PullRecord, Record
from kvxferd.telemetry.samples import Samples
from kvxferd.tooling.output import print_table, tuple_columns
from kvxferd.wire.limits import MAX_NAME_CHARS
from tests.support.node_samples import StillNode, node_snapshot, pull_record
from tests.support.terminal import on_terminal
from tests.support.verb_harness import daemon

VERBS = [["status"], ["engines"], ["peers"], ["transfers"], ["history"]]
WIDTHS = [40, 80]
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
    "peers": ["tcp://[fe80:1234:5678:9abc:def0:1234:5678:9abc]:65535", "prefill-0@g7"],
    "engines": [LONG, WIDE, "pp0.tp1", "direct"],
    "history": [LONG, WIDE, "lease-expired", "12 ms"],
    "transfers": [LONG, WIDE, "granted", "12.5 s"],
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


HEADS = tuple_columns("id", "size", "age", "note", optional=("age", "size"))
ROW = ("a" * 20, "b" * 20, "c" * 20, "d" * 20)


@pytest.mark.parametrize(
    ("columns", "heads"),
    [
        (86, ["ID", "SIZE", "AGE", "NOTE"]),
        (85, ["ID", "AGE", "NOTE"]),
        (63, ["ID", "NOTE"]),
        (20, ["ID", "NOTE"]),  # the terminal wraps it
        (None, ["ID", "SIZE", "AGE", "NOTE"]),
    ],
)
def test_a_narrow_terminal_gets_fewer_columns_and_a_note(
    columns: int | None, heads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = printed_table(columns, monkeypatch)
    title, head, row, *note = shown.splitlines()
    assert (title, head.split()) == ("Things", heads)
    assert row.split() == [ROW[["ID", "SIZE", "AGE", "NOTE"].index(name)] for name in heads]
    hidden = [name.lower() for name in ("SIZE", "AGE") if name not in heads]
    assert note == ([f"(a wider terminal, or a pipe, also has: {', '.join(hidden)})"] if hidden else [])


def printed_table(columns: int | None, monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    """Return what is printed of one row."""
    out = StringIO() if columns is None else TerminalText()
    monkeypatch.setenv("COLUMNS", str(columns or 80))
    monkeypatch.setenv("NO_COLOR", "1")
    with redirect_stdout(out):
        print_table("Things", HEADS, [ROW], **options)
    return out.getvalue()


def test_all_columns_where_they_are_wanted_and_how_many_rows_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = printed_table(20, monkeypatch, is_wide=True, more=3).splitlines()
    assert shown[1].split() == ["ID", "SIZE", "AGE", "NOTE"]
    assert shown[-1] == "(and 3 more)"
