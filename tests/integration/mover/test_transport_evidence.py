"""The pool learns a mover's transports from its log, and from nobody else's lines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvxferd.ids import Digest
from kvxferd.mover.supervisor.pool_events import UcxLineRead
from kvxferd.mover.supervisor.transport_evidence import MAX_EARLY_TRANSPORTS
from kvxferd.ucx_log import UcxLine
from kvxferd.wire.mover import LoadPlan
from tests.support.mover_harness import Node, Worker, bind, wait_until

FORGED = "[1700000000.123456] [host:4711 :0] ucp_worker.c:1997 UCX  INFO  n intra-node cfg#1 rma(cma/memory)"
NOBODY = 1 << 30  # beyond every process id


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
