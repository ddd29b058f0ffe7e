"""How a pull ends: once, within its deadline, and never free while something may still write."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from kvxferd.core import events as ev
from kvxferd.core.sink.pulls import LAST_WORD_S, RETRY_WITHIN_S
from kvxferd.errors import Code
from kvxferd.records import PullRecord
from kvxferd.wire import mover as mv
from kvxferd.wire import worker as wk
from kvxferd.wire.limits import IDS_PART_BYTES
from tests.support.simulation import IDS, SINK_IDS, TOKENS, held_pull, mover_of, spec_of

DELIVERED_BOTH_WAYS = True


def test_what_the_mover_had_said_before_the_deadline_counts_though_it_is_read_behind_it(world, source, sink):
    """This daemon stood still, or was busy: its timer is looked at before its sockets are."""
    ticket = held_pull(source, sink, deadline_s=3)
    world.advance(3.0 + LAST_WORD_S / 2)
    assert sink.ended(ticket) is None
    mover_of(sink).work()
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)
    assert [m.why for m in source.received(wk.Released)] == [Code.COMPLETED]
    world.advance(LAST_WORD_S)
    assert not sink.received(wk.TicketFailed)


def test_a_cancelled_read_of_which_nothing_is_proved_may_still_write(world, source, sink):
    ticket = held_pull(source, sink)
    sink.say(wk.Cancel(ticket=ticket))
    start = mover_of(sink).started.popleft()
    open_end = mv.PullOutcome(delivered=False, finished=False, code=Code.TRANSPORT, message="a read hangs")
    mover_of(sink).say(mv.PullDone(pull=start.pull, outcome=open_end))
    assert not sink.ended(ticket).safe_to_reuse


def test_a_mover_that_says_at_the_deadline_that_it_is_over_leaves_no_doubt(world, source, sink):
    ticket = held_pull(source, sink, deadline_s=3)
    world.advance(3.0)
    start = mover_of(sink).started.popleft()
    stopped = mv.PullOutcome(delivered=False, code=Code.CANCELLED, message="the pull was aborted")
    mover_of(sink).say(mv.PullDone(pull=start.pull, outcome=stopped))
    failed = sink.ended(ticket)
    assert (failed.code, failed.safe_to_reuse) == (Code.DEADLINE, True)
    assert "its deadline of 3.0 s passed while it was read" in failed.message


@pytest.mark.parametrize(
    ("ids", "tokens", "deadline_s", "code"),
    [
        ([7, 9, 99], TOKENS, 5.0, Code.BLOCKS_INVALID),  # the sink has 32 blocks
        ([7, 9], TOKENS, 5.0, Code.BLOCKS_INVALID),  # too few for the tokens
        (SINK_IDS, 0, 5.0, Code.BLOCKS_INVALID),  # nothing to pull
        (SINK_IDS, TOKENS, 0.0, Code.BAD_REQUEST),  # no time at all
        (SINK_IDS, TOKENS, 1e9, Code.BAD_REQUEST),  # milliseconds, most likely
        (SINK_IDS, TOKENS, float("nan"), Code.BAD_REQUEST),
        ([7, 9, 4, 5], TOKENS + 4, 5.0, Code.TOKENS_NOT_PUBLISHED),
    ],
)
def test_a_bad_pull_fails_with_a_sentence_and_the_session_goes_on(
    world, source, sink, ids, tokens, deadline_s, code
):
    ref, before = source.publish("t1", IDS, TOKENS), bytes(sink.memory)
    bad = sink.pull(ref, ids, tokens, deadline_s)
    assert sink.ended(bad).code is code
    assert sink.ended(bad).safe_to_reuse
    assert "cannot" in sink.ended(bad).message
    assert bytes(sink.memory) == before
    assert sink.reads(ref)


def test_an_endpoint_that_is_none_is_refused(source, sink):
    ref = msgspec.structs.replace(source.publish("t1", IDS, TOKENS), endpoint="ipc:///etc/passwd")
    assert sink.ended(sink.pull(ref, SINK_IDS, TOKENS)).code is Code.ENDPOINT_INVALID


def test_draining_refuses_what_is_new_and_finishes_what_runs(world, source, sink):
    mover = mover_of(sink)
    mover.hold = True
    ref = source.publish("t1", IDS, TOKENS)
    running = sink.pull(ref, SINK_IDS, TOKENS)
    sink.host.feed(ev.DrainRequested())
    assert sink.ended(sink.pull(ref, SINK_IDS, TOKENS)).code is Code.DRAINING
    assert not sink.host.node.is_idle
    mover.work()
    assert isinstance(sink.ended(running), wk.TicketDelivered)
    assert sink.host.node.is_idle


def test_long_block_lists_travel_in_parts(world):
    """More ids than a frame's part on the source's side: they arrive whole and in order."""
    num = IDS_PART_BYTES // 4 + 5
    host = world.host("p")
    facts = {"num_kv_heads": 1, "head_dim": 1, "block_tokens": 1, "num_blocks": num}
    source = world.register(host, spec_of("prefill", layers=1), **facts)
    sink = world.register(world.host("d"), spec_of("decode", layers=1), **facts)
    source.memory[:] = world.rng.randbytes(len(source.memory))
    ids = list(range(num))
    world.rng.shuffle(ids)
    ref = source.publish("t1", ids, num)
    ticket = sink.pull(ref, list(range(num)), num)
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)
    tensors = zip(source.layout.tensors, sink.layout.tensors, strict=True)
    for there, here in tensors:
        for token in (0, 1, num // 2, num - 1):
            want = source.memory[there.offset + ids[token] * there.block_stride :][: there.chunk_bytes]
            got = sink.memory[here.offset + token * here.block_stride :][: here.chunk_bytes]
            assert got == want


def test_a_ticket_stands_for_one_pull_at_a_time(world, source, sink):
    """What ends it names the ticket alone: of two pulls nobody could say which has ended."""
    mover_of(sink).hold = True
    ref = source.publish("t1", IDS, TOKENS)
    ticket = sink.pull(ref, SINK_IDS, TOKENS)
    sink.tickets = itertools.chain([ticket], sink.tickets)
    sink.pull(ref, SINK_IDS, TOKENS)
    assert [m.code for m in sink.received(wk.Farewell)] == [Code.BAD_FRAME]
    assert sink.host.node.is_idle


# --- a transport failure is read once more, on a new grant and a new connection, before anybody hears of it


def fail(worker, **outcome):
    """The mover says that its oldest pull failed in the transport."""
    mover = mover_of(worker)
    start = mover.started.popleft()
    agent = start.sources[0].agent
    known = {"delivered": False, "code": Code.TRANSPORT, "message": "lost", "agent": agent}
    mover.say(mv.PullDone(pull=start.pull, outcome=mv.PullOutcome(**known | outcome)))


def records(sink):
    return [r for r in sink.host.records if isinstance(r, PullRecord)]


def test_a_source_whose_mover_was_replaced_is_read_through_the_new_one(world, source, sink):
    ticket = held_pull(source, sink)
    mover_of(source).die()
    world.advance(1)  # another mover is bound
    mover_of(sink).hold = False
    mover_of(sink).copy()  # from an agent that is gone
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)
    assert sink.num_wrong(SINK_IDS, TOKENS, seed=1) == 0
    assert [m.why for m in source.received(wk.Released)] == [Code.COMPLETED]
    assert [r.retried for r in records(sink)] == [True]
    assert not any(sink.host.node.grant_client.num_grants().values())


def test_a_retry_that_has_its_grant_takes_as_long_as_its_pull_has(world, source, sink):
    ticket = held_pull(source, sink)
    fail(sink)
    sink.host.give_movers = False
    mover_of(sink).die()
    world.advance(2 * RETRY_WITHIN_S)  # it waits for a mover, for longer than a retry may wait for a grant
    assert sink.ended(ticket) is None


def test_the_second_failure_is_told(world, source, sink):
    ticket = held_pull(source, sink)
    fail(sink)
    assert sink.ended(ticket) is None
    fail(sink)
    failed = sink.ended(ticket)
    assert (failed.code, failed.safe_to_reuse) == (Code.TRANSPORT, True)
    assert not mover_of(sink).started
    assert not any(sink.host.node.grant_client.num_grants().values())


def test_what_may_still_be_written_is_not_read_again(world, source, sink):
    ticket = held_pull(source, sink)
    assert sink.host.node.snapshot().quarantined_bytes == 0
    fail(sink, finished=False)
    assert not sink.ended(ticket).safe_to_reuse
    assert not mover_of(sink).started
    # 3 blocks of 4 tokens, 2 layers, K and V, 2 heads of 2 x 2 bytes
    assert sink.host.node.snapshot().quarantined_bytes == 3 * 4 * 2 * 2 * 2 * 4


def test_it_is_not_read_again_just_before_its_deadline(world, source, sink):
    ticket = held_pull(source, sink, deadline_s=3)
    world.advance(2.9)
    fail(sink)
    assert sink.ended(ticket).safe_to_reuse


def test_a_source_that_does_not_answer_any_more_does_not_keep_the_engine_waiting(world, source, sink):
    ticket = held_pull(source, sink, deadline_s=60)
    world.cut.add(("d", "p"))
    fail(sink)
    world.advance(1.9)
    assert sink.ended(ticket) is None
    world.advance(0.2)
    failed = sink.ended(ticket)
    assert (failed.code, failed.safe_to_reuse, failed.message) == (Code.TRANSPORT, True, "lost")


def test_the_source_never_sees_the_transfer_without_a_reader_between_the_tries(world, source, sink):
    """The lease has long passed, and only the first try's grant holds it."""
    mover_of(sink).hold = True
    ticket = sink.pull(source.publish("t1", IDS, TOKENS, lease_s=5.0), SINK_IDS, TOKENS, deadline_s=60)
    world.advance(20)
    mover = mover_of(sink)
    fail(sink)
    mover.hold = False
    mover.work()
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)
