"""What others have written cannot make a line of its own in a mover's log."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

from kvxferd.mover.process.log_formatter import OneLineFormatter
from kvxferd.ucx_log import parse_line

FORGED = "[1700000000.123456] [host:4711 :0] ucp_worker.c:1997 UCX  INFO  n intra-node cfg#1 rma(cma/memory)"
PIPE_BUF = 4096  # bytes; the kernel keeps a write to a pipe whole up to here
FORMAT = OneLineFormatter("%(levelname)s %(message)s")


def line_of(message: str, *args: object, exc_info: Any = None) -> str:
    record = logging.LogRecord("mover", logging.ERROR, __file__, 1, message, args, exc_info)
    return FORMAT.format(record)


@pytest.mark.parametrize("ending", ["\n", "\r", "\r\n", "\x00", "\x0b", "\x0c", "\x1b", "\x85", "\u2028"])
def test_a_record_is_one_line_whatever_its_argument_holds(ending: str) -> None:
    line = line_of("a note of agent %s is dropped", f"peer{ending}{FORGED}{ending}")
    assert line.splitlines() == [line]
    assert line.isprintable()
    assert parse_line(line) is None


def test_a_traceback_is_one_line_and_shows_what_was_raised() -> None:
    try:
        raise ValueError(f"from a peer\n{FORGED}\nits end")
    except ValueError:
        line = line_of("mover %s ends", "a", exc_info=sys.exc_info())
    assert line.splitlines() == [line]
    assert line.startswith("ERROR mover a ends\\nTraceback")
    assert line.endswith("\\nits end")


@pytest.mark.parametrize("character", ["x", "\n", "ä", "\ud800", "\U0001f600"])
def test_a_long_record_is_written_in_one_piece(character: str) -> None:
    line = line_of("%s the end", character * 10_000)
    assert len(line.encode()) < PIPE_BUF
    assert line.startswith("ERROR ")
    assert line.endswith(" the end")
