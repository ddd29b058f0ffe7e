"""What others have written cannot make a line of its own in a mover's log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvxferd.core.ucx_log import UcxLine, is_about_connection, parse_line
from kvxferd.ids import Digest
from kvxferd.mover.process.log_formatter import OneLineFormatter
from kvxferd.mover.supervisor.pool_events import UcxLineRead
from kvxferd.mover.supervisor.transport_evidence import MAX_EARLY_TRANSPORTS
from kvxferd.wire.mover import LoadPlan
from tests.support.mover_harness import Node, Worker, bind, wait_until

FORGED = "[1700000000.123456] [host:4711 :0] ucp_worker.c:1997 UCX  INFO  n intra-node cfg#1 rma(cma/memory)"
NOBODY = 1 << 30  # beyond every process id
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
    assert not is_about_connection(line)


def test_a_traceback_is_one_line_and_shows_what_was_raised() -> None:
    try:
        raise ValueError(f"from a peer\n{FORGED}\nits end")
    except ValueError:
        line = line_of("mover %s ends", "a", exc_info=sys.exc_info())
    assert line.splitlines() == [line]
    assert not is_about_connection(line)
    assert line.startswith("ERROR mover a ends\\nTraceback")
    assert line.endswith("\\nits end")


@pytest.mark.parametrize("character", ["x", "\n", "ä", "\ud800", "\U0001f600", "cfg#"])
def test_a_long_record_is_written_in_one_piece(character: str) -> None:
    line = line_of("%s the end", character * 10_000)
    assert len(line.encode()) < PIPE_BUF
    assert line.startswith("ERROR ")
    assert line.endswith(" the end")


@pytest.mark.parametrize("num_lost", [0, 1])
async def test_lines_of_unknown_processes_do_not_add_up(num_lost: int) -> None:
    async with Node("here", size=0) as node:
        pool, evidence = node.pool, node.pool._decisions.evidence
        mover = await pool.acquire()
        for pid in range(10):  # of nobody: no fork is under way
            pool._feed(UcxLineRead(UcxLine(NOBODY + pid, "INFO", "NAME intra-node cfg#1 rma(cma/memory)")))
        assert evidence.num_early == 0
        pool.resize(1)
        for pid in range(MAX_EARLY_TRANSPORTS + num_lost):
            pool._feed(UcxLineRead(UcxLine(NOBODY + pid, "INFO", "NAME intra-node cfg#1 rma(cma/memory)")))
        assert evidence.num_early == MAX_EARLY_TRANSPORTS
        assert evidence.is_complete(mover.mover_id) is not bool(
            num_lost
        )  # what was lost may have been of any mover
        pool.set_busy(True)  # no third mover is forked
        await pool.acquire()
        assert evidence.num_early == 0


async def test_a_mover_forges_no_line_for_whoever_sends_it_a_text(
    node: Node, make_worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    mover, _ = await bind(node, make_worker("E"))
    evidence = node.pool._decisions.evidence
    known = evidence.transports_of(mover.mover_id)
    mover.send(LoadPlan(digest=Digest(f"none\n{FORGED.replace('4711', str(mover.pid))}\n"), encoded=b"none"))
    await wait_until(lambda: "plan not loaded: plan=none" in caplog.text, "the plan is refused")
    (complaint,) = [
        record.getMessage() for record in caplog.records if "plan not loaded" in record.getMessage()
    ]
    assert "intra-node" in complaint
    assert evidence.transports_of(mover.mover_id) == known
    assert evidence.is_complete(mover.mover_id)
