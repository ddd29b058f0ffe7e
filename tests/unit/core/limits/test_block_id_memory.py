"""The block ids that requests keep have a limit of bytes, and in it a share of each user."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

import pytest

from kvxferd.core import events as ev
from kvxferd.core.limits.block_id_memory import (
    CHAR_BYTES,
    ENTRY_BYTES,
    GROUP_BYTES,
    RANK_BYTES,
)
from kvxferd.core.limits.ledger import Share
from kvxferd.core.limits.table import BLOCK_ID_BYTES
from kvxferd.errors import BusyError, Code
from kvxferd.ids import Incarnation, Rank
from kvxferd.layout import PackedBlocks, pack_ids
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import CLIENT_MESSAGES, encode
from tests.support.simulation import IDS, SINK_IDS, TOKENS, Worker, World, mover_of

FIRST, SECOND = 1000, 2000
ONE = ENTRY_BYTES + GROUP_BYTES + 4 * len(IDS)


PUBLISHED = ONE + RANK_BYTES + CHAR_BYTES * len("first")  # it names the incarnation of its one rank


def limit_to(worker: Worker, num_requests: int, size: int = ONE) -> None:
    """Have the worker's daemon keep so many requests of this size, an eighth of them for other users."""
    worker.host.node.context.ledger[BLOCK_ID_BYTES].limit = num_requests * size * 8 // 7 + 8


def kept(worker: Worker) -> int:
    return worker.host.node.context.ledger[BLOCK_ID_BYTES].held


def test_one_user_leaves_room_for_another() -> None:
    kept_ids = Share(BLOCK_ID_BYTES, 1600)
    kept_ids.check(FIRST, 1400, "publish")
    kept_ids.add(FIRST, 1400)
    with pytest.raises(BusyError, match="1400 of them of uid 1000"):
        kept_ids.check(FIRST, 1, "publish")
    kept_ids.check(SECOND, 100, "publish")


def test_a_publish_past_the_limit_is_busy_until_another_is_released(source: Worker) -> None:
    limit_to(source, 3, PUBLISHED)
    for number in range(4):
        source.publish(f"t{number}", IDS, TOKENS)
    (refused,) = source.received(wk.PublishRefused)
    assert (refused.transfer_id, refused.code) == ("t3", Code.BUSY)
    assert refused.retry_after_s > 0
    source.say(wk.Unpublish(transfer_id="t0"))
    source.publish("t4", IDS, TOKENS)
    assert len(source.received(wk.PublishRefused)) == 1
    source.close()
    assert kept(source) == 0


def test_a_pull_past_the_limit_is_busy_until_another_ends(source: Worker, sink: Worker) -> None:
    limit_to(sink, 3)  # a pull keeps its own ids, and the source's
    refs = [source.publish(f"t{number}", IDS, TOKENS) for number in range(3)]
    mover_of(sink).hold = True
    first = sink.pull(refs[0], SINK_IDS, TOKENS)
    second = sink.pull(refs[1], SINK_IDS, TOKENS)  # there is room for its ids, and none for the source's
    assert sink.ended(first) is None
    failed = sink.ended(second)
    assert isinstance(failed, wk.TicketFailed)
    assert failed.code is Code.BUSY
    assert failed.safe_to_reuse
    mover_of(sink).hold = False
    mover_of(sink).copy()
    mover_of(sink).finish()
    assert kept(sink) == 0
    third = sink.pull(refs[1], SINK_IDS, TOKENS)
    assert isinstance(sink.ended(third), wk.TicketDelivered | None)
    sink.close()
    assert kept(sink) == 0


def test_what_is_prepared_and_left_keeps_nothing(world: World, source: Worker, sink: Worker) -> None:
    refs = [source.publish(f"t{number}", IDS, TOKENS) for number in range(3)]
    for ref in refs:
        sink.say(wk.Prepare(ref=ref))
    each = ENTRY_BYTES + ONE + len(b"fence")  # the pull, its grant, the metadata of the source's fence page
    assert kept(sink) == 3 * each
    sink.say(wk.Abandon(ref=refs[0]))
    assert kept(sink) == 2 * each
    sink.close()
    assert kept(sink) == 0


def test_what_a_publish_names_of_ranks_that_are_absent_is_counted(world: World) -> None:
    """Nobody judges it, and each publish may name something else."""
    host = world.host("a")
    ranks = world.engine(host, "prefill", tp=64)
    first, absent = ranks[0], ranks[1:]
    for worker in absent:
        worker.close()
    before = kept(first)
    named = [(Rank(0, 0), Incarnation("first"))]
    named += [(Rank(0, number), Incarnation(f"{number:0250}")) for number in range(1, 64)]
    first.publish("t1", IDS, TOKENS, incarnations=tuple(named))
    assert not first.received(wk.PublishRefused)
    assert kept(first) - before > 63 * 250
    first.say(wk.Unpublish(transfer_id="t1"))
    assert kept(first) == before


# --- what a kept request is counted for is what it takes: measured, with a tolerance


NUM_BEFORE, NUM = 20, 60


def bytes_of_each(keep: Callable[[int], object]) -> float:
    """Return what each of many calls leaves behind."""
    kept = [keep(number) for number in range(NUM_BEFORE)]  # what the first ones set up
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        kept += [keep(NUM_BEFORE + number) for number in range(NUM)]
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return (after - before) / NUM


def payload(number: int, groups: int, worker: Worker) -> bytes:
    blocks = {f"group-{index:010}": PackedBlocks(pack_ids(IDS)) for index in range(groups)}
    if groups == 1:
        blocks = {"full": PackedBlocks(pack_ids(IDS))}
    publish = wk.Publish(
        transfer_id=f"cmpl-{number:032}",
        nonce=f"{number:032}",
        blocks=blocks,
        num_tokens=TOKENS,
        fence_slot=number,
        incarnations=worker.known,
    )
    return encode(publish)


def test_a_published_transfer_takes_what_it_is_counted_for(source: Worker) -> None:
    """2.1 KB with ids of 32 characters (2026-11-22): its timers, indexes, names and its one group."""
    payloads = [payload(number, 1, source) for number in range(NUM_BEFORE + NUM)]
    words = [b"w" * 12 + number.to_bytes(4, "big") for number in range(NUM_BEFORE + NUM)]
    node, now = source.host.node, source.world.now

    def publish(number: int) -> None:
        said = CLIENT_MESSAGES.decode(payloads[number])
        assert not node.feed(ev.WorkerMessage(source.session, said, None, words[number]), now)

    each = bytes_of_each(publish) - 4 * len(IDS)
    assert each == pytest.approx(ENTRY_BYTES + GROUP_BYTES, rel=0.25)


@pytest.mark.slow
def test_a_pull_takes_what_it_is_counted_for(source: Worker, sink: Worker) -> None:
    """3.4 KB with its hold, and 1.0 KB of the grant at its source, which counts grants by number instead."""
    refs = [source.publish(f"cmpl-{number:032}", IDS, TOKENS) for number in range(NUM_BEFORE + NUM)]
    mover_of(sink).hold = True

    def pull(number: int) -> None:
        blocks = {"full": PackedBlocks(pack_ids(SINK_IDS))}
        said = wk.PullRequest(
            ticket=number, ref=refs[number], blocks=blocks, num_tokens=TOKENS, deadline_s=500.0
        )
        sink.say(CLIENT_MESSAGES.decode(encode(said)))

    each = bytes_of_each(pull)
    counted = sink.host.node.context.ledger[BLOCK_ID_BYTES].held / (NUM_BEFORE + NUM)
    assert each == pytest.approx(counted, rel=0.25)


def test_a_group_is_counted_for_more_than_it_takes(source: Worker) -> None:
    """103 bytes (2026-11-22); a name that msgspec does not remember takes up to 300 more, of its own user."""
    few, many = ([payload(n, groups, source) for n in range(NUM_BEFORE + NUM)] for groups in (8, 40))
    each = [bytes_of_each(lambda n, p=payloads: CLIENT_MESSAGES.decode(p[n])) for payloads in (few, many)]
    assert GROUP_BYTES / 4 <= (each[1] - each[0]) / 32 - 4 * len(IDS) <= GROUP_BYTES
