"""What `/v1/topology` returns: the terms of what was used last, within the time of one turn of the loop."""

from __future__ import annotations

import msgspec

from kvxferd.control.node_admin import terms_of_all
from kvxferd.ids import EngineId
from kvxferd.plan import TransferTopology
from tests.support.attention_engines import engine, layout_of, spec
from tests.support.fetched_engine import register


def topology_of(*engines: tuple[str, int]) -> TransferTopology:
    """Return the topology of one rank that has read these engines, each with so many ranks."""
    own = spec(tp=1, heads=8)
    made = TransferTopology(own, layout_of(own))
    for name, tp in engines:
        named = {
            rank: (msgspec.structs.replace(own, engine_id=EngineId(name)), layout)
            for rank, (own, layout) in engine(tp=tp, heads=8).items()
        }
        register(made, named)
    return made


def test_the_last_used_are_shown_first_as_far_as_ranks_have_room() -> None:
    made = topology_of(("first", 4), ("second", 2), ("third", 1))
    for now, known in enumerate(made.engines()):
        known.last_used = float(now)
    shown = terms_of_all([made], now=10.0)
    assert [terms["engine_id"] for terms in shown] == ["third", "second", "first"]
    assert [terms["last_used_s"] for terms in shown] == [8.0, 9.0, 10.0]
    assert [terms["engine_id"] for terms in terms_of_all([made], 10.0, max_ranks=6)] == ["third", "second"]


def test_a_line_of_the_log_names_the_first_ranks_of_many() -> None:
    made = topology_of(("many", 64))
    assert "handshake_target_ranks=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15] and 48 more" in (
        made.describe(EngineId("many"))
    )
