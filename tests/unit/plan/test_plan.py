"""A plan as it is sent."""

from __future__ import annotations

from kvxferd.ids import Rank
from kvxferd.plan import decode_plan, encode_plan, make_plan
from tests.support.attention_engines import engine


def test_plans_travel_as_bytes() -> None:
    """Equal layouts give equal digests wherever they are planned; decoding gives the plan back."""
    sink, source = engine(tp=3, heads=6), engine(tp=2, pp=2, heads=6, layout="NHD")
    remote = {r: held[1] for r, held in source.items()}
    plan = make_plan(*sink[Rank(0, 1)], source[Rank(0, 0)][0], remote)
    again = decode_plan(encode_plan(plan))
    assert again == plan
    assert again.sources == plan.sources == tuple(source)
    assert isinstance(again.sources[0], Rank)
