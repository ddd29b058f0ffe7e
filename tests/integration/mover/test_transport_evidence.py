"""A mover finds in its own log by which transports it has connected, and reports them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from kvxferd.ids import Digest
from kvxferd.wire.mover import LoadPlan, TransportsSeen
from tests.support.mover_harness import Node, Worker, bind, wait_until

FORGED = "[1700000000.123456] [host:4711 :0] ucp_worker.c:1997 UCX  INFO  n intra-node cfg#1 rma(rc/memory)"


def seen(node: Node) -> list[TransportsSeen]:
    return [message for _, message in node.said if isinstance(message, TransportsSeen)]


def append_to_output(pid: int, text: str) -> None:
    with open(f"/proc/{pid}/fd/1", "a") as output:
        output.write(text)


async def test_a_mover_reports_its_connection_to_itself_and_nothing_that_others_wrote(
    node: Node, make_worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    mover, _ = await bind(node, make_worker("E"))
    await wait_until(lambda: bool(seen(node)), "the connection to itself is reported")
    mover.send(LoadPlan(digest=Digest(f"none\n{FORGED.replace('4711', str(mover.pid))}\n"), encoded=b"none"))
    await wait_until(lambda: "plan not loaded: plan=none" in caplog.text, "the plan is refused")
    (complaint,) = [
        record.getMessage() for record in caplog.records if "plan not loaded" in record.getMessage()
    ]
    assert "intra-node" in complaint
    assert [one.reach for one in seen(node)] == ["itself"]
    assert "cma/memory" in seen(node)[0].transports


async def test_what_a_mover_wrote_before_it_died_is_logged(
    node: Node, make_worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    mover, _ = await bind(node, make_worker("E"))
    os.kill(mover.pid, signal.SIGSTOP)
    append_to_output(mover.pid, "the last words\n")
    mover.kill()
    await node.gone(mover)
    await wait_until(lambda: "the last words" in caplog.text, "it is logged")
