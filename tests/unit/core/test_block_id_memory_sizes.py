"""What a kept request is counted for is what it takes: measured, with a tolerance."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

import pytest

from kvxferd.core import events as ev
from kvxferd.core.block_id_memory import ENTRY_BYTES, GROUP_BYTES
from kvxferd.layout import PackedBlocks, pack_ids
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import CLIENT_MESSAGES, encode
from tests.support.simulation import IDS, SINK_IDS, TOKENS, Worker, mover_of

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
        said = wk.Pull(ticket=number, ref=refs[number], blocks=blocks, num_tokens=TOKENS, deadline_s=500.0)
        sink.say(CLIENT_MESSAGES.decode(encode(said)))

    each = bytes_of_each(pull)
    counted = sink.host.node.block_id_memory.num_bytes / (NUM_BEFORE + NUM)
    assert each == pytest.approx(counted, rel=0.25)


def test_a_group_is_counted_for_more_than_it_takes(source: Worker) -> None:
    """103 bytes (2026-11-22); a name that msgspec does not remember takes up to 300 more, of its own user."""
    few, many = ([payload(n, groups, source) for n in range(NUM_BEFORE + NUM)] for groups in (8, 40))
    each = [bytes_of_each(lambda n, p=payloads: CLIENT_MESSAGES.decode(p[n])) for payloads in (few, many)]
    assert GROUP_BYTES / 4 <= (each[1] - each[0]) / 32 - 4 * len(IDS) <= GROUP_BYTES
