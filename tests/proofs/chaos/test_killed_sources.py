"""Ten sources die while one rank reads from all of them."""

from __future__ import annotations

import os
import signal
import time

import pytest

from kvxferd.mover.ucx_settings import tls_with_cuda
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.rank_process import RankProcess
from tests.support.nodes.requests import TOKENS, ids_for, publish, pull_and_check, spec_of
from tests.support.nodes.waiting import wait_until

NUM_SOURCES = 10
# TCP, so that a stopped source stops its readers. Without its log nobody knows that it is TCP, which is how
# a network card is dealt with.
PROVED = {"UCX_TLS": tls_with_cuda("tcp")}
UNKNOWN = {"UCX_TLS": "^cma", "UCX_LOG_LEVEL": "warn"}


@pytest.mark.timeout(300)  # 22 movers of a second of a core each; where others work beside it, the double
@pytest.mark.parametrize(("environment", "is_proved"), [(PROVED, True), (UNKNOWN, False)])
def test_ten_killed_sources(fleet: Fleet, environment: dict[str, str], is_proved: bool):
    daemon = fleet.daemon("node", **environment)
    sources = [fleet.engine(daemon, spec_of(f"prefill-{n}"))[0] for n in range(NUM_SOURCES + 1)]
    (sink,) = fleet.engine(daemon, spec_of("decode"), num_blocks=64 * NUM_SOURCES)
    for number, source in enumerate(sources):
        pull_and_check([sink], publish([source], number), number)
    good = sources.pop()
    movers = [mover for source in sources for mover in daemon.movers_of(source.memory_inode())]
    assert len(movers) == NUM_SOURCES
    refs = [publish([source], 100 + number) for number, source in enumerate(sources)]
    for ref in refs:
        sink.prepare(ref)  # a stopped mover could not answer that it polls
    wait_until(lambda: _num_grants(daemon) == NUM_SOURCES, "all are granted")
    for mover in movers:
        os.kill(mover, signal.SIGSTOP)
    num_blocks = len(ids_for(0, 16))
    ids = [list(range(n * num_blocks, (n + 1) * num_blocks)) for n in range(NUM_SOURCES + 1)]
    tickets = [sink.pull(ref, ids[n], TOKENS) for n, ref in enumerate(refs)]
    wait_until(lambda: _num_posted(daemon) == NUM_SOURCES, "all are being read")
    for mover in movers:
        os.kill(mover, signal.SIGKILL)
    ends, most_bytes = _ends(sink, daemon, tickets)
    after = sink.pull(publish([good], 200), ids[NUM_SOURCES], TOKENS)
    name, fields = sink.end_of(after)
    assert name == "Delivered", fields
    assert sink.num_wrong(200, ids[NUM_SOURCES], TOKENS) == 0
    wait_until(lambda: not daemon.status()["quarantined_bytes"], "nothing is in doubt any more")
    for number, ticket in enumerate(tickets):
        if ends[ticket][0] == "Delivered":
            assert sink.num_wrong(100 + number, ids[number], TOKENS) == 0
    if is_proved:
        # Most are read again through their source's next mover; ten of those take their time.
        assert all(name == "Delivered" or fields["safe_to_reuse"] for name, fields in ends.values()), ends
        assert not most_bytes
    else:
        # What was being read is in doubt, and fails. What a starved mover had not begun is read from the
        # source's next mover.
        assert "Failed" in [name for name, _ in ends.values()]


def _num_grants(daemon: Daemon) -> int:
    return int(daemon.status()["num_grants_held"])


def _num_posted(daemon: Daemon) -> int:
    return sum(pull["phase"] == "posted" for pull in daemon.status()["pulls"])


def _ends(sink: RankProcess, daemon: Daemon, tickets: list[int]) -> tuple[dict[int, tuple[str, dict]], int]:
    """Each ticket's terminal event, in whatever order they come; and the most bytes that were in doubt."""
    ends: dict[int, tuple[str, dict]] = {}
    most_bytes = 0
    deadline = time.monotonic() + 60.0
    while len(ends) < len(tickets):
        assert time.monotonic() < deadline, f"only {ends} ended"
        most_bytes = max(most_bytes, daemon.status()["quarantined_bytes"])
        if (event := sink.next_event(0.002)) is not None and event[0] in ("Delivered", "Failed"):
            ends[event[1]["ticket"]] = event
    return ends, most_bytes
