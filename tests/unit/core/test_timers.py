"""One event never does the work of a thousand pulls: what is due together is done in turns."""

from __future__ import annotations

import pytest

from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.core.context import CALLS_PER_EVENT, CALLS_PER_TICK
from kvxferd.errors import Code, ProtocolError
from kvxferd.wire import worker as wk
from kvxferd.wire.common import TransferRef
from tests.support.simulation import SINK_IDS, TOKENS, Host, World

NUM = 300


def refs_to(host: Host, engine: str = "prefill") -> list[TransferRef]:
    return [TransferRef(host.endpoint, engine, "g1", f"t{n}", "nonce") for n in range(NUM)]


def fed(world: World, host: Host, event: ev.Event) -> int:
    """Feed one event alone; return how many pulls ended with it."""
    effects = host.node.feed(event, world.now)
    host.node.check_integrity()
    for effect in effects:
        host.apply(effect)
    return sum(isinstance(e, fx.SendToWorker) and isinstance(e.message, wk.TicketFailed) for e in effects)


def ended_in_turns(world: World, host: Host, event: ev.Event) -> list[int]:
    """Feed the event, then as many ticks as are due now; return how many pulls ended with each."""
    counts = [fed(world, host, event)]
    while (deadline := host.node.next_deadline()) is not None and deadline <= world.now:
        counts.append(fed(world, host, ev.Tick()))
    return counts


def test_pulls_with_one_deadline_end_in_turns(world, source, sink):
    world.cut |= {("d", "p"), ("p", "d")}
    tickets = [sink.pull(ref, SINK_IDS, TOKENS, deadline_s=5.0) for ref in refs_to(source.host)]
    world.schedule.now += 5.0
    counts = ended_in_turns(world, sink.host, ev.Tick())
    assert sum(counts) == NUM
    assert max(counts) <= CALLS_PER_TICK
    assert {sink.ended(ticket).code for ticket in tickets} == {Code.DEADLINE}


@pytest.mark.parametrize("event", ["unreachable", "broke the protocol", "dropped"])
def test_pulls_whose_peer_fails_end_in_turns(world, source, sink, event):
    node, endpoint = sink.host.node, source.host.endpoint
    sink.say(wk.Prepare(ref=refs_to(source.host, "other")[0]))  # the peer is greeted
    world.hold_network = True
    tickets = [sink.pull(ref, SINK_IDS, TOKENS, deadline_s=60.0) for ref in refs_to(source.host)]
    open_before = len(node.peer_requests)
    if event == "unreachable":
        counts = ended_in_turns(world, sink.host, ev.PeerUnreachable(endpoint, "gone"))
    elif event == "dropped":
        counts = ended_in_turns(world, sink.host, ev.PeerDropRequested(endpoint))
    else:
        node.peers.give_up(endpoint, ProtocolError("nonsense"))
        assert not node.peer_requests.num_open(endpoint)  # an answer is taken no more
        counts = ended_in_turns(world, sink.host, ev.Tick())
    assert open_before >= 1
    assert sum(counts) == NUM
    assert event == "broke the protocol" or counts[0] <= CALLS_PER_EVENT
    assert max(counts) <= CALLS_PER_TICK
    assert all(isinstance(sink.ended(ticket), wk.TicketFailed) for ticket in tickets)
    assert node.peers._open_request_share.held == 0
