"""A local rank's registry in a running node: two homes of one id, restarts, expiry, what a hold keeps."""

from __future__ import annotations

import msgspec
import pytest

from kvxferd.config import TransferConfig
from kvxferd.core import Settings
from kvxferd.core import events as ev
from kvxferd.core.context import CALLS_PER_EVENT
from kvxferd.core.limits.table import REMOTE_ENGINE_BYTES
from kvxferd.errors import BusyError, Code
from kvxferd.ids import Endpoint
from kvxferd.wire import worker as wk
from kvxferd.wire.common import TransferRef
from tests.support.simulation import IDS, SINK_IDS, TOKENS, World

HOLD_S = 60.0


@pytest.fixture
def world() -> World:
    return World(settings=Settings(transfer=TransferConfig(max_hold_s=HOLD_S)))


def test_two_homes_that_name_one_engine_id_neither_refuse_nor_evict_each_other(world, sink):
    """Their blocks have 4 and 8 tokens: 11 tokens are 3 blocks of the one and 2 of the other."""
    sources = [
        (world.engine(world.host("p"), "prefill")[0], IDS),
        (world.engine(world.host("q"), "prefill", block_tokens=8)[0], IDS[:2]),
    ]
    for turn in range(2):
        for number, (source, ids) in enumerate(sources):
            source.fill(ids, TOKENS, seed=number)
            ticket = sink.pull(source.publish(f"t{turn}-{number}", ids, TOKENS), IDS, TOKENS)
            assert isinstance(sink.ended(ticket), wk.TicketDelivered), sink.ended(ticket)
            assert sink.num_wrong(IDS, TOKENS, seed=number) == 0


def test_a_hold_keeps_its_plan_and_manifest_when_a_new_generation_replaces_its_engine(world):
    """The new one has blocks of another size, so by its plan the old one's bytes would be wrong."""
    prefill, decode = world.host("p"), world.host("d")
    (old,) = world.engine(prefill, "prefill")
    (sink,) = world.engine(decode, "decode")
    old.fill(IDS, TOKENS, seed=1)
    ref = old.publish("t1", IDS, TOKENS)
    sink.say(wk.Prepare(ref=ref))
    (new,) = world.engine(prefill, "prefill", generation="g2", block_tokens=8)
    new.fill(IDS[:2], TOKENS, seed=2)
    ticket = sink.pull(new.publish("t2", IDS[:2], TOKENS), [4, 5, 6], TOKENS)
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)
    assert isinstance(sink.ended(sink.pull(ref, IDS, TOKENS)), wk.TicketDelivered)
    assert sink.num_wrong(IDS, TOKENS, seed=1) == 0
    assert sink.num_wrong([4, 5, 6], TOKENS, seed=2) == 0


# --- what is not wanted any more is forgotten: engines that restart under new names do not add up


def test_engines_and_agents_that_nobody_wants_are_forgotten_when_others_are_learnt(world):
    prefill, decode = world.host("p"), world.host("d")
    (sink,) = world.engine(decode, "decode")
    for number in range(8):
        (source,) = world.engine(prefill, f"prefill-{number}")
        source.fill(IDS, TOKENS, seed=number)
        ticket = sink.pull(source.publish(f"t{number}", IDS, TOKENS), IDS, TOKENS)
        assert isinstance(sink.ended(ticket), wk.TicketDelivered)
        source.close()
        world.advance(HOLD_S * 0.6)
    (mover,) = [m for m in decode.movers.values() if m.alive]
    assert len(mover.remotes) <= 2
    assert len(list(decode.node.sessions[sink.session].rank.topology.engines())) <= 2


# --- plans are made beside the loop


@pytest.fixture
def jobs():
    """The plans that a sink's shell was told to make."""
    return []


@pytest.fixture
def waiting(world, jobs):
    """A sink, and two pulls of an engine that it reads for the first time. Their plan takes long."""
    (source,), (sink,) = world.engine(world.host("p"), "prefill"), world.engine(world.host("d"), "decode")
    sink.host.make_plan = jobs.append
    source.fill(IDS, TOKENS, seed=1)
    return sink, [sink.pull(source.publish(name, IDS, TOKENS), IDS, TOKENS) for name in ("t1", "t2")]


def test_pulls_that_wait_for_one_plan_have_it_made_once_and_one_is_cancelled_alone(waiting, jobs):
    sink, (first, second) = waiting
    (job,) = jobs
    assert [sink.ended(first), sink.ended(second)] == [None, None]
    sink.say(wk.Cancel(ticket=first))
    assert sink.ended(first).code is Code.CANCELLED
    sink.host.feed(ev.PlanMade(job, job.make()))
    assert isinstance(sink.ended(second), wk.TicketDelivered)


def test_pulls_whose_plan_cannot_be_made_now_are_refused_and_the_next_one_tries_again(waiting, jobs):
    sink, tickets = waiting
    sink.host.feed(ev.PlanMade(jobs[0], BusyError("the system has no thread now", 1.0)))
    assert {sink.ended(ticket).code for ticket in tickets} == {Code.BUSY}
    (source,) = sink.world.hosts["p"].workers.values()
    ticket = sink.pull(source.publish("t3", IDS, TOKENS), IDS, TOKENS)
    sink.host.feed(ev.PlanMade(jobs[1], jobs[1].make()))
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)


def test_a_pull_whose_deadline_passes_while_its_plan_is_made_says_so(world, waiting):
    sink, tickets = waiting
    world.advance(6.0)
    failed = sink.ended(tickets[0])
    assert (failed.code, failed.safe_to_reuse) == (Code.DEADLINE, True)
    assert "this node planned the reads of engine prefill" in failed.message


def test_a_manifest_that_comes_after_its_grant_has_ended_is_charged_to_nobody(source, sink):
    """Where thousands wait for one manifest, most get it in later turns."""
    node, ref = sink.host.node, source.publish("t1", IDS, TOKENS)
    sink.say(wk.Prepare(ref=ref))
    (hold,) = node.worker_requests.prepared()
    sink.say(wk.Abandon(ref=ref))
    client = node.handshake_client
    client.on_learnt(hold, client.find_engine("prefill").acquire())
    assert hold.remote is None
    client.forget_engine(source.host.endpoint, ref.engine)
    assert node.context.ledger[REMOTE_ENGINE_BYTES].held == 0


def test_a_pull_does_not_join_a_fetch_whose_peer_was_dropped_just_now() -> None:
    """What was asked of that peer fails in the turns that follow: there may be thousands."""
    world = World()
    sink = world.engine(world.host("d"), "decode")[0]
    node, refs = sink.host.node, [
        TransferRef("tcp://nobody:9441", f"prefill-{n}", "g1", "t", "n") for n in range(3 * CALLS_PER_EVENT)
    ]  # fmt: skip
    for ref in refs:
        sink.say(wk.Prepare(ref=ref))
    node.feed(ev.PeerDropRequested(Endpoint(refs[0].endpoint)), world.now)
    assert node.context.is_behind
    ticket = sink.pull(msgspec.structs.replace(refs[-1], transfer_id="other"), SINK_IDS, TOKENS)
    world.advance(1.0)
    assert sink.ended(ticket) is None
    node.check_integrity()
