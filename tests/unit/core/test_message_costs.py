"""What one message may cost: counted in what it looks at, not in time."""

from __future__ import annotations

import pytest

from kvxferd.errors import Code, ProtocolError
from kvxferd.ids import Incarnation, Rank
from kvxferd.layout import PackedBlocks
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import CLIENT_MESSAGES, encode
from kvxferd.wire.limits import (
    MAX_DELIVERED_BY_MOVER,
    MAX_GROUPS_PER_REQUEST,
    MAX_RANKS,
    MAX_REGIONS,
    MAX_SENTENCE_CHARS,
)
from tests.support.simulation import IDS, SINK_IDS, TOKENS, World, mover_of


class Counted(int):
    """A ticket that counts how often it is compared."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.num_compared += 1
        return int(self) == other

    __hash__ = int.__hash__


@pytest.mark.parametrize("num_pulls", [1, 64])
def test_noticed_costs_its_tickets_and_not_pulls_times_tickets(num_pulls: int) -> None:
    world = World()
    (source,) = world.engine(world.host("a"), "prefill")
    (sink,) = world.engine(world.host("b"), "decode")
    mover_of(sink).hold = True
    tickets = [sink.pull(source.publish(f"t{n}", IDS, TOKENS), SINK_IDS, TOKENS) for n in range(num_pulls)]
    Counted.num_compared = 0
    strange = tuple(Counted(n) for n in range(10_000, 10_000 + MAX_DELIVERED_BY_MOVER - num_pulls))
    sink.say(wk.DeliveredByMover(tickets=(*strange, *map(Counted, tickets))))  # type: ignore[arg-type]
    assert Counted.num_compared <= 4 * MAX_DELIVERED_BY_MOVER
    mover_of(sink).die()
    assert all(isinstance(sink.ended(ticket), wk.TicketDelivered | None) for ticket in tickets)


def test_more_tickets_than_there_can_be_pulls_end_the_session() -> None:
    world = World()
    (sink,) = world.engine(world.host("b"), "decode")
    sink.say(wk.DeliveredByMover(tickets=tuple(range(MAX_DELIVERED_BY_MOVER + 1))))  # type: ignore[arg-type]
    (farewell,) = sink.received(wk.Farewell)
    assert isinstance(farewell, wk.Farewell)
    assert farewell.code is Code.BAD_FRAME


@pytest.mark.parametrize("kind", ["groups", "incarnations"])
def test_a_list_longer_than_it_may_be_is_not_decoded(kind: str) -> None:
    """A frame has room for 209,000 incarnations, which take 230 ms."""
    named = ((Rank(0, 0), Incarnation("i")),) * (MAX_RANKS + 1 if kind == "incarnations" else 1)
    names = range(MAX_GROUPS_PER_REQUEST + 1 if kind == "groups" else 1)
    publish = wk.Publish(
        transfer_id="t",
        nonce="n",
        blocks={f"g{n}": PackedBlocks(b"") for n in names},
        num_tokens=1,
        fence_slot=0,
        incarnations=named,
    )
    with pytest.raises(ProtocolError, match="length <="):
        CLIENT_MESSAGES.decode(encode(publish))


def test_what_was_wrongly_exported_is_said_in_short() -> None:
    world = World()
    (model,) = world.engine(world.host("layout"), "e")
    worker = world.connect(world.host("a"))
    regions = tuple(wk.RegionExport(f"{number:0200}", 1) for number in range(MAX_REGIONS))
    assert model.spec is not None
    assert model.layout is not None
    register = wk.Register(
        request=1, engine=model.spec, layout=model.layout, regions=regions, incarnation="i"
    )
    worker.say(register)
    (refused,) = worker.received(wk.Refused)
    assert isinstance(refused, wk.Refused)
    assert refused.code is Code.REGION_INVALID
    assert len(refused.message) <= MAX_SENTENCE_CHARS
