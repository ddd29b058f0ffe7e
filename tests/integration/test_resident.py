"""Resident movers: whoever goes, the others notice: workers, daemons, threads, and agents that do not go."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time

import pytest

from kvxferd.errors import Code, MoverError
from kvxferd.ids import AgentName
from kvxferd.mover.transport.base import Transport
from kvxferd.mover.ucx_settings import tls_with_cuda
from kvxferd.resident.thread_mover import ThreadMover
from kvxferd.tooling.child_process import ChildError
from tests.support import faulty_transports
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.rank_process import RankProcess
from tests.support.nodes.requests import TOKENS, ids_for, publish, pull_and_check, rank_shown, spec_of
from tests.support.nodes.waiting import wait_until

LARGE = {"num_blocks": 1024, "head_dim": 128}  # 256 MiB
MANY = 1024 * 16


def large_read(source: RankProcess, sink: RankProcess, name: str = "large", deadline_s: float = 20.0) -> int:
    """Have the sink read all blocks of the source; return once it does, with the ticket."""
    source.scribble()
    ref = source.publish(name, list(range(1024)), MANY)
    ticket = sink.pull(ref, list(range(1024)), MANY, deadline_s)
    sink.await_first_bytes()
    return ticket


def test_a_worker_that_dies_while_it_is_read(fleet: Fleet) -> None:
    tcp = {"UCX_TLS": tls_with_cuda("tcp")}
    daemon = fleet.shared("node")
    (source,) = fleet.engine(daemon, spec_of("prefill"), "register_resident", tcp, **LARGE)
    (sink,) = fleet.engine(daemon, spec_of("decode"), "register_resident", tcp, **LARGE)
    ticket = large_read(source, sink)
    source.kill()
    name, fields = sink.end_of(ticket)
    assert name == "Failed", fields
    if not fields["safe_to_reuse"]:
        assert sink.await_event("Quiesced")["ticket"] == ticket
    (again,) = fleet.engine(daemon, spec_of("prefill"), "register_resident", tcp, **LARGE)
    pull_and_check([sink], publish([again], 3), 3)


def test_a_restarted_daemon_gets_new_movers(fleet: Fleet) -> None:
    daemon = fleet.daemon("node")
    source, sink = fleet.pair(daemon, how="register_resident")
    ref = publish([source], 1)
    before = {rank_shown(daemon, name)["agent"] for name in ("prefill", "decode")}
    num_threads = source.num_threads()
    daemon.kill()
    ticket = sink.pull(ref, ids_for(1001), TOKENS)  # waits for the next daemon
    daemon.start()
    wait_until(lambda: daemon.is_ready, "the daemon back")
    name, fields = sink.end_of(ticket)
    # The reference names the old daemon's endpoint, a port that the new one need not have.
    assert name == "Delivered" or fields["safe_to_reuse"], fields
    wait_until(lambda: rank_shown(daemon, "prefill").get("state") == "ready", "registered again")
    wait_until(lambda: rank_shown(daemon, "decode").get("state") == "ready", "registered again")
    after = {rank_shown(daemon, name)["agent"] for name in ("prefill", "decode")}
    assert not before & after
    assert {agent.split("/")[0] for agent in after} == {daemon.status()["boot"]}
    pull_and_check([sink], publish([source], 2), 2)
    wait_until(lambda: source.num_threads() == num_threads, "the old mover's thread gone")


def test_a_daemon_that_dies_in_mid_read_leaves_safe_blocks(fleet: Fleet) -> None:
    """The client ends its own mover, and so knows that nothing is written any more."""
    daemon = fleet.daemon("node")
    (source,) = fleet.engine(daemon, spec_of("prefill"), **LARGE)
    (sink,) = fleet.engine(daemon, spec_of("decode"), "register_resident", **LARGE)
    ticket = large_read(source, sink)
    daemon.kill()
    name, fields = sink.end_of(ticket)
    assert (name, fields["code"], fields["safe_to_reuse"]) == ("Failed", "daemon-lost", True)
    assert sink.is_still()


def test_a_frozen_daemon_does_not_hold_the_memory(fleet: Fleet) -> None:
    daemon = fleet.daemon("node")
    (source,) = fleet.engine(daemon, spec_of("prefill"), "register_resident")
    publish([source], 1)
    daemon.send_signal(signal.SIGSTOP)
    try:
        assert source.close() is False
        source.free()
        assert source.num_threads() > 0  # it lives
    finally:
        daemon.send_signal(signal.SIGCONT)


def test_a_mover_thread_that_breaks_is_replaced(fleet: Fleet) -> None:
    daemon = fleet.shared("node")
    source = fleet.rank()
    source.use_transport(faulty_transports.brittle)
    fleet.register(daemon, spec_of("prefill"), "register_resident", source)
    (sink,) = fleet.engine(daemon, spec_of("decode"), "register_resident")
    pull_and_check([sink], publish([source], 1), 1)
    ref = publish([source], 2)
    before = rank_shown(daemon, "prefill")["agent"]
    num_sessions = daemon.status()["num_sessions"]
    source.run(faulty_transports.arm)
    # Whoever reads it has it polled; what was published lives on with the session.
    ids = ids_for(1002, 16)
    name, fields = sink.end_of(sink.pull(ref, ids, TOKENS))
    if name == "Failed":  # it was reading as the thread broke
        assert fields["code"] is Code.TRANSPORT
        sink.await_event("Quiesced")
        pull_and_check([sink], ref, 2)
    assert sink.num_wrong(2, ids, TOKENS) == 0
    wait_until(lambda: rank_shown(daemon, "prefill")["state"] == "ready", "another mover")
    after = rank_shown(daemon, "prefill")
    assert after["agent"] != before
    assert daemon.status()["num_sessions"] == num_sessions
    assert "broken on purpose" in daemon.log_text()
    assert source.await_event("Released")["transfer_id"] == "req-1"
    assert source.await_event("Released") == {"transfer_id": "req-2", "why": "completed"}


def test_a_mover_that_cannot_be_made_refuses_the_registration(fleet: Fleet) -> None:
    daemon = fleet.shared("node")
    rank = fleet.rank()
    rank.use_transport(faulty_transports.missing)
    with pytest.raises(ChildError) as raised:
        fleet.register(daemon, spec_of("prefill"), "register_resident", rank)
    assert raised.value.code == "nixl-unavailable"
    assert "no library on this node" in raised.value.message
    assert daemon.status()["engines"] == []
    rank.use_transport(faulty_transports.brittle)
    fleet.register(daemon, spec_of("prefill"), "register_resident", rank)
    assert rank_shown(daemon, "prefill")["state"] == "ready"


def test_an_agent_that_sticks_keeps_its_blocks_in_doubt(fleet: Fleet) -> None:
    daemon = fleet.daemon("node")
    (source,) = fleet.engine(daemon, spec_of("prefill"))
    sink = fleet.rank()
    sink.use_transport(faulty_transports.sticky)
    fleet.register(daemon, spec_of("decode"), "register_resident", sink)
    ref = publish([source], 1)
    sink.run(faulty_transports.arm)
    ticket = sink.pull(ref, ids_for(1001), TOKENS, deadline_s=0.5)
    name, fields = sink.end_of(ticket)
    assert (name, fields["code"], fields["safe_to_reuse"]) == ("Failed", "deadline", False)
    wait_until(lambda: "stuck in the transfer library" in daemon.log_text(), "the log says so", 15.0)
    assert (daemon.status()["num_quarantined"], daemon.status()["num_retired_movers"]) == (1, 1)
    # The rank has another mover meanwhile, and the engine goes on.
    wait_until(lambda: rank_shown(daemon, "decode")["state"] == "ready", "another mover")
    pull_and_check([sink], publish([source], 2), 2)
    assert daemon.status()["num_quarantined"] == 1
    # Its memory may not go before the stuck agent has gone.
    sink.suspend()
    assert sink.next_event(0.5) is None
    assert rank_shown(daemon, "decode")["state"] == "suspending"
    sink.run(faulty_transports.let_go)
    assert sink.await_event("Quiesced")["ticket"] == ticket
    sink.await_event("Suspended")
    assert (daemon.status()["num_quarantined"], daemon.status()["num_retired_movers"]) == (0, 0)
    sink.resume()
    pull_and_check([sink], publish([source], 3), 3)


def test_closing_with_a_stuck_agent_says_that_the_memory_must_stay(fleet: Fleet) -> None:
    daemon = fleet.daemon("node")
    rank = fleet.rank()
    rank.use_transport(faulty_transports.sticky)
    fleet.register(daemon, spec_of("decode"), "register_resident", rank)
    rank.run(faulty_transports.arm)
    began = time.monotonic()
    assert rank.close() is True
    assert time.monotonic() - began < 5.0
    rank.run(faulty_transports.let_go)
    wait_until(lambda: not rank.may_be_touched(), "the agent gone")


# --- a process that is forked from a worker holds copies of its mover's descriptors


def readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(20_000))


def test_a_movers_end_is_known_though_a_forked_process_holds_its_descriptors() -> None:
    """Else its rank would never be suspended, and blocks in doubt stay so until that process ends."""
    inherited: list[int] = []
    may_end = threading.Event()

    def make(agent: AgentName) -> Transport:
        may_end.wait()
        raise MoverError("no library", Code.NIXL_UNAVAILABLE)

    mover = ThreadMover(AgentName("a"), (), make)
    inherited += [os.dup(mover._socket.fileno()), os.dup(mover._quiesced_write_fd)]
    daemon = socket.socket(fileno=os.dup(mover.daemon_end))
    try:
        may_end.set()
        assert readable(mover.fileno())
        assert readable(daemon.fileno())
        while daemon.recv(4096):
            assert readable(daemon.fileno())
        assert mover.wait(0)
    finally:
        daemon.close()
        for fd in inherited:
            os.close(fd)
        mover.close()
