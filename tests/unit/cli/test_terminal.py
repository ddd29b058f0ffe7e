"""Tables on terminals of several widths: nothing is cut, and nothing moves the cursor."""

from __future__ import annotations

import asyncio
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvxferd.cli.root import root
from kvxferd.errors import Code
from kvxferd.ids import BootId, Endpoint
from kvxferd.records import NodeSnapshot, Record
from kvxferd.telemetry.samples import Samples
from kvxferd.tooling.output import print_table, tuple_columns
from kvxferd.wire.limits import MAX_NAME_CHARS
from tests.support.node_samples import StillNode, node_snapshot, pull_record
from tests.support.terminal import on_terminal
from tests.support.verb_harness import daemon

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
        node, names = node_snapshot(), (LONG, WIDE, HOSTILE)
        (engine, *_), (peer, *_), (transfer, *_), (pull, *_) = (
            node.engines, node.peers, node.transfers, node.pulls
        )  # fmt: skip
        return replace(
            node,
            endpoint=ENDPOINT,
            boot=BootId(LONG),
            engines=tuple(replace(engine, engine_id=name, generation=name) for name in names),
            peers=(replace(peer, endpoint=ENDPOINT, boot=BootId(WIDE)),),
            transfers=tuple(replace(transfer, transfer_id=name, engine_id=LONG) for name in names),
            pulls=tuple(replace(pull, transfer_id=name) for name in names),
        )

    def records(self) -> list[Record]:
        failed = pull_record("failed", Code.LEASE_EXPIRED)
        return [replace(failed, transfer_id=n, message=f"cannot pull {n}") for n in (LONG, WIDE, HOSTILE)]


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


@pytest.mark.parametrize("columns", [40, 80, None])
@pytest.mark.parametrize("verb", WANTED)
async def test_nothing_is_cut_and_nothing_steers_the_terminal(
    tmp_path: Path, verb: str, columns: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemon(tmp_path, LongNames()) as config:
        arguments = [verb, "--socket", config.control.socket]
        shown = await asyncio.to_thread(run_in_terminal, arguments, columns, monkeypatch)
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    plain = STYLE.sub("", shown)
    assert all(character.isprintable() or character == "\n" for character in plain)
    if columns is None:
        assert plain == shown
        assert not any(line.endswith(" ") for line in shown.splitlines())
    for name in WANTED[verb]:
        assert name in plain, name  # whole, and in one line


class FailingPulls(StillNode):
    """A node whose pulls from one peer fail."""

    @property
    def samples(self) -> Samples:
        found = Samples()
        failed = pull_record("failed", Code.PEER_UNREACHABLE)
        found.add(replace(failed, peer=ENDPOINT))
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
async def test_without_color_there_is_no_escape_sequence(socket: tuple[str, str]) -> None:
    def written_on_terminal(**environ: str) -> str:
        with on_terminal(["transfers", *socket], columns=100, environ=environ) as terminal:
            return terminal.read_to_end()

    written = await asyncio.to_thread(written_on_terminal, NO_COLOR="1")
    coloured = await asyncio.to_thread(written_on_terminal)
    assert "\x1b" not in written
    assert STYLE.sub("", coloured) == written
    assert STYLE.search(coloured)
    assert max(map(len, written.splitlines())) <= 100


TITLES = ["ID", "SIZE", "AGE", "NOTE"]
HEADS = tuple_columns("id", "size", "age", "note", optional=("age", "size"))
ROW = ("a" * 20, "b" * 20, "c" * 20, "d" * 20)


@pytest.mark.parametrize(
    ("columns", "left_out", "options"),
    [
        (86, [], {}),
        (85, ["SIZE"], {}),
        (63, ["SIZE", "AGE"], {}),
        (20, ["SIZE", "AGE"], {}),  # the terminal wraps it
        (20, [], {"is_wide": True, "more": 3}),
        (None, [], {}),
    ],
)
def test_a_narrow_terminal_gets_fewer_columns_and_a_note(
    columns: int | None, left_out: list[str], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = StringIO() if columns is None else TerminalText()
    monkeypatch.setenv("COLUMNS", str(columns or 80))
    monkeypatch.setenv("NO_COLOR", "1")
    with redirect_stdout(out):
        print_table("Things", HEADS, [ROW], **options)
    title, head, row, *notes = out.getvalue().splitlines()
    shown = [(name, text) for name, text in zip(TITLES, ROW, strict=True) if name not in left_out]
    assert (title, list(zip(head.split(), row.split(), strict=True))) == ("Things", shown)
    hidden = ", ".join(left_out).lower()
    assert notes == (
        [f"(a wider terminal, or a pipe, also has: {hidden})"] * bool(hidden)
        + ["(and 3 more)"] * ("more" in options)
    )
