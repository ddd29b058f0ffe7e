"""A mover that a stalled source holds up: its other pulls end or are read again, its death ends the doubt."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from kvxferd.core import events as ev
from kvxferd.core.ranks.movers import RETIRED_S
from kvxferd.core.sink.pulls import LAST_WORD_S, MAX_MOVERS_LOST
from kvxferd.core.sink.stalled_sources import MAX_SOURCES, MAX_STALLS, REFUSED_S, WINDOW_S, SourceBreaker
from kvxferd.errors import Code, EngineError
from kvxferd.wire import mover as mv
from kvxferd.wire import worker as wk
from kvxferd.wire.common import TransferRef
from tests.support.simulation import (
    IDS,
    SINK_IDS,
    TOKENS,
    Mover,
    Worker,
    World,
    delivers,
    held_pull,
    mover_of,
    spec_of,
)

DELIVERED_BOTH_WAYS = True
by_mover = pytest.mark.parametrize("world", [True], indirect=True, ids=["by-mover"])
OTHER_IDS = [12, 14, 16]
NUMBERS = itertools.count()


def live_movers(worker: Worker) -> list[Mover]:
    return [m for m in worker.host.movers.values() if m.worker is worker and m.alive]


def stall(world: World, source: Worker, sink: Worker, deadline_s: float = 1.0) -> int:
    """A pull that its mover never ends. The mover holds all pulls from here on."""
    mover_of(sink).hold = True
    ref = source.publish(f"stalled-{next(NUMBERS)}", IDS, TOKENS)
    ticket = sink.pull(ref, SINK_IDS, TOKENS, deadline_s)
    mover_of(sink).started.pop()
    return ticket


def retire(world: World, source: Worker, sink: Worker) -> int:
    """A stalled pull whose doubt has lasted too long."""
    ticket = stall(world, source, sink)
    world.advance(1.0 + LAST_WORD_S + world.settings.quiesce_s)
    return ticket


def test_other_pulls_end_on_the_old_mover_and_new_ones_go_to_the_next(world, source, sink):
    old = mover_of(sink)
    stalled = stall(world, source, sink)
    running = sink.pull(source.publish("t2", IDS, TOKENS), OTHER_IDS, TOKENS, deadline_s=60)
    world.advance(1.0 + LAST_WORD_S + world.settings.quiesce_s)
    assert len(live_movers(sink)) == 2
    assert not sink.received(wk.TicketQuiesced)
    new = sink.pull(source.publish("t3", IDS, TOKENS), [20, 21, 22], TOKENS)
    assert isinstance(sink.ended(new), wk.TicketDelivered)  # by the next mover: the old one holds
    mover_of(sink).hold = True  # what that one reads keeps the old one no longer
    sink.pull(source.publish("t4", IDS, TOKENS), [24, 25, 26], TOKENS, deadline_s=60)
    old.work()
    assert isinstance(sink.ended(running), wk.TicketDelivered)
    assert not old.alive
    assert sink.received(wk.TicketQuiesced) == [wk.TicketQuiesced(ticket=stalled)]
    assert [sink.num_wrong(ids, TOKENS, seed=1) for ids in (OTHER_IDS, [20, 21, 22])] == [0, 0]
    assert not any(r.retried for r in sink.host.records if hasattr(r, "retried"))


def test_what_does_not_end_in_time_is_read_again_by_the_next_mover(world, source, sink):
    old = mover_of(sink)
    stalled = stall(world, source, sink)
    running = [
        sink.pull(source.publish(f"t{n}", IDS, TOKENS), ids, TOKENS, deadline_s=60)
        for n, ids in enumerate((OTHER_IDS, [20, 21, 22]))
    ]
    world.advance(1.0 + LAST_WORD_S + world.settings.quiesce_s + RETIRED_S - 0.1)
    assert old.alive
    assert [sink.ended(ticket) for ticket in running] == [None, None]
    world.advance(0.2)
    assert not old.alive
    assert [type(sink.ended(ticket)) for ticket in running] == [wk.TicketDelivered] * 2
    assert sink.received(wk.TicketQuiesced) == [wk.TicketQuiesced(ticket=stalled)]
    assert sink.num_wrong(OTHER_IDS, TOKENS, seed=1) == 0
    assert sorted(m.why for m in source.received(wk.Released)) == [Code.COMPLETED] * 2


def test_a_pull_that_ends_every_mover_fails_after_some(world, source, sink):
    ticket = None
    for _ in range(MAX_MOVERS_LOST + 1):
        mover_of(sink).hold = True
        ticket = ticket or sink.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS, deadline_s=60)
        world.settle()
        assert sink.ended(ticket) is None
        mover = mover_of(sink)
        sink.host.give_movers = False
        mover.die()
        world.advance(1)
        sink.host.give_movers = True
        if sink.ended(ticket) is None:
            sink.host.bring_mover(hold=True)
    failed = sink.ended(ticket)
    assert (failed.code, failed.safe_to_reuse) == (Code.MOVER_LOST, True)


def test_a_pull_that_waits_for_the_next_mover_fails_safely_at_its_deadline(world, source, sink):
    ticket = held_pull(source, sink, deadline_s=3)
    sink.host.give_movers = False
    mover_of(sink).die()
    world.advance(3.1)
    assert (sink.ended(ticket).code, sink.ended(ticket).safe_to_reuse) == (Code.DEADLINE, True)


def test_a_read_that_fails_while_its_rank_is_suspended_is_not_read_again(world, source, sink):
    mover = mover_of(sink)
    ticket = held_pull(source, sink, deadline_s=30)
    failed = mv.PullOutcome(delivered=False, started=True, finished=True, code=Code.TRANSPORT, message="lost")
    mover.last_report = mv.PullDone(pull=mover.started[-1].pull, outcome=failed)
    sink.say(wk.Suspend())
    assert sink.received(wk.Suspended)
    assert (sink.ended(ticket).code, sink.ended(ticket).safe_to_reuse) == (Code.TRANSPORT, True)
    assert not sink.host.node.pulls.running()


def test_suspend_ends_a_retired_mover_too(world, source, sink):
    stall(world, source, sink)
    sink.pull(source.publish("t2", IDS, TOKENS), OTHER_IDS, TOKENS, deadline_s=60)
    world.advance(1.0 + LAST_WORD_S + world.settings.quiesce_s)
    assert len(live_movers(sink)) == 2
    sink.say(wk.Suspend())
    assert sink.received(wk.Suspended)
    assert not live_movers(sink)


def test_whoever_reads_from_a_retired_mover_goes_on(world, source, sink):
    """A rank is a source too: its readers hold the old agent's name."""
    reader = world.engine(world.host("r"), "reader")[0]
    old = mover_of(sink)
    sink.fill(OTHER_IDS, TOKENS, seed=9)
    mover_of(reader).hold = True
    reading = reader.pull(sink.publish("s1", OTHER_IDS, TOKENS), SINK_IDS, TOKENS, deadline_s=60)
    retire(world, source, sink)
    assert old.alive
    assert old.attended
    mover_of(reader).work()
    assert isinstance(reader.ended(reading), wk.TicketDelivered)
    assert reader.num_wrong(SINK_IDS, TOKENS, seed=9) == 0
    world.advance(world.settings.polling_linger_s + 0.1)
    assert not old.alive
    assert len(sink.received(wk.TicketQuiesced)) == 1


def test_where_no_second_mover_can_be_bound_the_retired_one_ends_at_once(world, source, sink):
    """A GPU's memory need not hold two contexts."""
    old = mover_of(sink)
    stall(world, source, sink)
    running = sink.pull(source.publish("t2", IDS, TOKENS), OTHER_IDS, TOKENS, deadline_s=60)
    sink.refuses_binds = lambda: old.alive
    world.advance(1.0 + LAST_WORD_S + world.settings.quiesce_s)
    assert not old.alive
    world.advance(1)
    assert isinstance(sink.ended(running), wk.TicketDelivered)
    assert sink.connected


def test_doubt_that_nothing_but_death_ends_retires_the_mover_at_once(world, source, sink):
    old = mover_of(sink)
    old.hold = True
    ticket = sink.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS, deadline_s=60)
    start = old.started.popleft()
    outcome = mv.PullOutcome(delivered=False, finished=False, quiesced_follows=False, code=Code.TRANSPORT)
    old.say(mv.PullDone(pull=start.pull, outcome=outcome))
    assert not sink.ended(ticket).safe_to_reuse
    assert not old.alive
    assert sink.received(wk.TicketQuiesced) == [wk.TicketQuiesced(ticket=ticket)]
    assert len(live_movers(sink)) == 1


@by_mover
def test_a_delivery_that_only_the_worker_knows_of_is_not_read_again(world, source, sink):
    """Its engine uses the blocks already: whoever wrote them again would write over that."""
    old = mover_of(sink)
    old.hold = True
    ticket = sink.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS, deadline_s=60)
    old.copy()
    sink.inbox.append(wk.TicketDelivered(ticket=ticket, bytes=1, runs=1, wire_s=0.0))
    sink.fill(SINK_IDS, TOKENS, seed=5)  # the engine goes on
    old.die()
    world.advance(2)
    assert sink.num_wrong(SINK_IDS, TOKENS, seed=5) == 0
    assert [m.why for m in source.received(wk.Released)] == [Code.COMPLETED]


@by_mover
def test_a_worker_that_does_not_say_what_it_knows_has_its_pulls_fail(world, source, sink):
    sink.resume_pulls = lambda number, tickets: None
    ticket = held_pull(source, sink, deadline_s=4)
    before = bytes(sink.memory)
    mover_of(sink).die()
    world.advance(4.1)
    assert (sink.ended(ticket).code, sink.ended(ticket).safe_to_reuse) == (Code.DEADLINE, True)
    assert bytes(sink.memory) == before


@pytest.mark.parametrize("name", ["tickets", "arrived"])
def test_an_answer_has_as_many_tickets_as_pulls_may_run(world, sink, name):
    many = {"tickets": (), name: tuple(range(1025))}
    sink.say(wk.PullsResumed(number=1, **many))
    assert "1024 pulls may run" in sink.received(wk.Farewell)[0].message


def test_a_grant_that_ended_before_the_next_mover_came_is_asked_for_anew(world, source, sink):
    ticket = held_pull(source, sink, deadline_s=600)
    sink.host.give_movers = False
    mover_of(sink).die()
    world.advance(1)
    source.say(wk.Unpublish(transfer_id="t1"))
    world.advance(world.settings.transfer.lease_s)
    assert sink.ended(ticket) is None
    sink.host.bring_mover(hold=True)
    world.advance(1)
    assert (sink.ended(ticket).code, sink.ended(ticket).safe_to_reuse) == (Code.RELEASED, True)


# --- sources that do it again and again


def test_a_source_that_stalls_again_and_again_is_refused_for_a_while(world, source, sink):
    for _ in range(MAX_STALLS):
        retire(world, source, sink)
        world.advance(1)
    other = world.engine(world.host("o"), "other")[0]
    other.fill(IDS, TOKENS, seed=4)
    refused = sink.ended(sink.pull(source.publish("t9", IDS, TOKENS), SINK_IDS, TOKENS))
    assert refused.code is Code.SOURCE_STALLED
    assert 0 < refused.retry_after_s <= REFUSED_S
    assert "cannot pull transfer t9" in refused.message
    assert delivers(other, sink, "o1")
    world.advance(refused.retry_after_s + 0.1)
    assert delivers(source, sink, "t10")


def test_one_failure_of_a_source_that_many_ranks_read_counts_once(world):
    """On a network card the death of one source's mover retires a mover of each rank that reads from it."""
    context = world.host("d").node.context
    stalls = SourceBreaker(context)
    ref = TransferRef("tcp://n:1", "e", "g", "t", "n")
    for _ in range(MAX_STALLS - 1):
        for _ in range(8):
            stalls.record_stall(1000, ref)
            context.now += context.settings.quiesce_s / 10
        context.now += context.settings.quiesce_s
    stalls.check(1000, ref, "cannot pull")
    stalls.record_stall(1000, ref)
    with pytest.raises(EngineError, match="did not end"):
        stalls.check(1000, ref, "cannot pull")


def test_stalls_are_counted_for_a_while_and_for_so_many_sources(world):
    context = world.host("d").node.context
    stalls = SourceBreaker(context)
    refs = [TransferRef(f"tcp://{n}:1", "e", "g", "t", "n") for n in range(MAX_SOURCES + 10)]
    for ref in refs:
        for _ in range(MAX_STALLS):
            stalls.record_stall(1000, ref)
            context.now += context.settings.quiesce_s
        context.now -= MAX_STALLS * context.settings.quiesce_s
    assert len(stalls) == MAX_SOURCES
    stalls.check(1000, refs[0], "")  # forgotten for the sake of later ones
    with pytest.raises(EngineError, match="did not end"):
        stalls.check(1000, refs[-1], "cannot pull")
    stalls.check(1001, refs[-1], "")  # another user's readers are not refused
    context.now += WINDOW_S + MAX_STALLS * context.settings.quiesce_s
    stalls.record_stall(1000, refs[0])
    assert len(stalls) == 1


def test_a_bind_that_is_refused_without_a_retired_mover_ends_the_rank(world):
    worker = world.engine(world.host("d"), "decode")[0]
    worker.refuses_binds = lambda: True
    mover_of(worker).die()
    world.advance(1)
    assert [m.code for m in worker.received(wk.Farewell)] == [Code.DEVICE_ERROR]


def test_a_member_rank_stays_joined_while_its_mover_is_retired_and_its_home_knows_when_it_sleeps(
    world, monkeypatch
):
    home, member = world.host("home"), world.host("member")
    spec = spec_of("decode", pp=2, home=home.endpoint)
    world.register(home, spec)
    second = world.register(member, msgspec.structs.replace(spec, pp_rank=1))
    (engine,) = home.node.registry
    member.node.movers.retire(mover_of(second).mover)
    member.feed(ev.Tick())
    world.settle()
    assert not engine.missing()
    assert engine.ranks[(1, 0)].agent == mover_of(second).agent
    retired = mover_of(second)
    monkeypatch.setattr(member, "kill_mover", lambda mover: None)
    member.give_movers = False
    member.node.movers.retire(retired.mover)
    member.feed(ev.Tick())
    assert not engine.missing()  # readers go on with it
    second.say(wk.Suspend())
    retired.die()
    assert second.received(wk.Suspended)
    assert engine.missing() == [second.spec.rank]


@by_mover
def test_an_answer_is_to_one_interruption_alone(world, source, sink):
    """The next mover may die before the worker has answered for the pulls of the first."""
    requested: list[tuple[int, tuple[int, ...]]] = []
    reply = sink.resume_pulls
    sink.resume_pulls = lambda number, tickets: requested.append((number, tickets))
    old = mover_of(sink)
    stall(world, source, sink)
    first = sink.pull(source.publish("t1", IDS, TOKENS), OTHER_IDS, TOKENS, deadline_s=60)
    world.advance(1.0 + LAST_WORD_S + world.settings.quiesce_s)
    mover_of(sink).hold = True
    second = sink.pull(source.publish("t2", IDS, TOKENS), [20, 21, 22], TOKENS, deadline_s=60)
    mover_of(sink).die()
    old.die()
    world.advance(1)
    assert sorted(tickets for _, tickets in requested) == [(first,), (second,)]
    for number, tickets in requested:
        reply(number, tickets)
    world.advance(1)
    assert isinstance(sink.ended(first), wk.TicketDelivered)
    assert isinstance(sink.ended(second), wk.TicketDelivered)
