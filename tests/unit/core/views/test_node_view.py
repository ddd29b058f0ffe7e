"""A node with very many transfers is shown in pieces: counted whole, listed up to a limit."""

from __future__ import annotations

import itertools

from kvxferd.core.node import Node
from kvxferd.core.source.transfer_table import Transfer
from kvxferd.core.views.node_view import BATCH, MAX_SHOWN
from kvxferd.ids import BootId, Endpoint, EngineId, EngineKey, Generation, SessionId, TransferId

NUM = MAX_SHOWN + 2 * BATCH + 7


def full_node() -> Node:
    tokens = itertools.count()
    node = Node(boot=BootId("b"), endpoint=Endpoint("tcp://a:1"), new_token=lambda: f"{next(tokens):032x}")
    for number in range(NUM):
        node.published.table.add(
            Transfer(
                engine=EngineKey(EngineId("e"), Generation("g")),
                transfer_id=TransferId(f"req-{number}"),
                nonce="",
                session=SessionId(1),
                uid=0,
                fence_slot=number,
                fence_word=b"",
                blocks={},
                num_tokens=1,
                num_readers=1,
                published_at=0.0,
                lease_expires_at=30.0,
                incarnations={},
            )
        )
    return node


def test_pauses_come_between_the_pieces_and_nothing_is_left_out_of_the_counts() -> None:
    *pauses, shown = full_node().snapshot_steps()
    assert pauses == [None] * -(-NUM // BATCH)
    assert shown is not None
    assert len(shown.transfers) == MAX_SHOWN
    assert shown.transfer_states == {"writing": NUM}


def test_what_ends_during_a_pause_is_shown_all_the_same() -> None:
    node = full_node()
    steps = node.snapshot_steps()
    next(steps)
    node.published.table.live.clear()
    shown = next(step for step in steps if step is not None)
    assert shown.transfer_states == {"writing": NUM}
