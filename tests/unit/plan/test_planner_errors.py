"""Layouts broken on purpose: each is refused, and the message names what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kvxferd.errors import Code, PlanError
from kvxferd.ids import Rank
from kvxferd.layout import CacheTensor, EngineSpec, RankLayout, TokenShard, UnitRange
from tests.support.attention_engines import engine, plan_between

Engine = dict[Rank, tuple[EngineSpec, RankLayout]]
Change = Callable[[CacheTensor], CacheTensor | None]


def changed(source: Engine, change: Change) -> Engine:
    """Return the engine with every tensor changed, or dropped where `change` returns None."""
    made = {}
    for rank, (spec, layout) in source.items():
        tensors = [new for tensor in layout.tensors if (new := change(tensor)) is not None]
        made[rank] = (spec, msgspec.structs.replace(layout, tensors=tuple(tensors)))
    return made


def refusal(source: Engine, sink: Engine | None = None) -> PlanError:
    """Return the error of planning rank 0 of `sink` against `source`."""
    with pytest.raises(PlanError) as caught:
        plan_between(engine() if sink is None else sink, source)
    return caught.value


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        # a layer dropped
        (lambda t: None if t.layer == 1 else t, Code.COVERAGE_GAP, ["layer 1", "'prefill'"]),
        # a component dropped
        (lambda t: None if t.component == "v" else t, Code.COVERAGE_GAP, ["'v'", "layer 0", "'k'"]),
        # a head range dropped
        (
            lambda t: msgspec.structs.replace(t, units=(UnitRange(0, 1), UnitRange(3, 4))),
            Code.COVERAGE_GAP,
            ["unit range [1, 3)", "layer 0", "'k'", "[0, 1), [3, 4)"],
        ),
        # another dtype and another item size: both are named, with both values
        (
            lambda t: msgspec.structs.replace(t, itemsize=1, dtype="float8_e4m3"),
            Code.LAYOUT_INCOMPATIBLE,
            ["itemsize", "2 here and 1 at the source", "'bfloat16' here and 'float8_e4m3'"],
        ),
        # another head_dim
        (
            lambda t: msgspec.structs.replace(t, chunk_bytes=8),
            Code.LAYOUT_INCOMPATIBLE,
            ["content_bytes", "'k'", "4 here and 8 at the source"],
        ),
        # as many bytes per head, in another order
        (
            lambda t: msgspec.structs.replace(t, encoding="swizzle-16"),
            Code.LAYOUT_INCOMPATIBLE,
            ["encoding", "'' here and 'swizzle-16' at the source"],
        ),
        # two tokens per item against one
        (
            lambda t: msgspec.structs.replace(t, granule_tokens=2, chunk_bytes=4),
            Code.LAYOUT_INCOMPATIBLE,
            ["granule_tokens", "1 here and 2 at the source"],
        ),
    ],
)
def test_a_broken_source_is_refused_by_name(change: Change, code: Code, words: list[str]) -> None:
    """One change to every tensor of the source."""
    error = refusal(changed(engine(), change))
    assert error.code is code
    assert [word for word in words if word not in error.message] == []
    assert error.message.startswith("cannot ")
    assert error.message.count("'k'") <= 2, "once a component and field, not a layer"


def with_shard(held: tuple[EngineSpec, RankLayout], shard: TokenShard) -> tuple[EngineSpec, RankLayout]:
    """Return the rank with its group's tokens sharded."""
    spec, layout = held
    group = msgspec.structs.replace(layout.groups[0], token_shard=shard)
    return spec, msgspec.structs.replace(layout, groups=(group,))


def test_a_missing_token_shard_is_a_gap() -> None:
    """Two ranks of one head each deal the tokens out; one of them is not there."""
    source = {
        Rank(0, i): with_shard(engine(tp=1)[Rank(0, 0)], TokenShard(3, index, 2))
        for i, index in enumerate([0, 2])
    }
    error = refusal(source)
    assert error.code is Code.COVERAGE_GAP
    assert "token range [2, 4) of every 6" in error.message


def test_ranks_that_deal_tokens_out_differently_are_refused() -> None:
    """One rank says 2 shards, the other 3."""
    source = {
        Rank(0, i): with_shard(engine(tp=1)[Rank(0, 0)], TokenShard(count, i, 1))
        for i, count in enumerate([2, 3])
    }
    error = refusal(source)
    assert error.code is Code.LAYOUT_INCOMPATIBLE
    assert "(2, 1), (3, 1) at the source" in error.message


def test_interleavings_that_never_meet_again_are_refused() -> None:
    """Sizes chosen so that the common period is astronomical: refused, not computed."""
    sink = {Rank(0, 0): with_shard(engine()[Rank(0, 0)], TokenShard(1009, 0, 1021))}
    source = {Rank(0, 0): with_shard(engine()[Rank(0, 0)], TokenShard(1013, 0, 1019))}
    error = refusal(source, sink)
    assert error.code is Code.LAYOUT_INCOMPATIBLE
    assert "too rarely" in error.message


def test_units_dealt_out_too_finely_are_refused() -> None:
    """Every second of a quarter of a million channels on each of two ranks."""
    count = 1 << 18
    even = tuple(UnitRange(2 * u, 2 * u + 1) for u in range(count // 2 + 1))
    odd = tuple(UnitRange(2 * u + 1, 2 * u + 2) for u in range(count // 2 + 1))
    sink = changed(
        engine(heads=1, layers=1), lambda t: msgspec.structs.replace(t, units=(UnitRange(0, count + 1),))
    )
    spec, layout = engine(heads=1, layers=1)[Rank(0, 0)]
    source = {
        Rank(0, i): (
            spec,
            msgspec.structs.replace(
                layout, tensors=tuple(msgspec.structs.replace(t, units=units) for t in layout.tensors)
            ),
        )
        for i, units in enumerate([even, odd])
    }
    error = refusal(source, sink)
    assert error.code is Code.LAYOUT_INCOMPATIBLE
    assert "over 65536 pieces" in error.message


def test_components_without_width_need_no_source() -> None:
    """Both ways to say it: no unit ranges, and one empty range."""
    for units in ((), (UnitRange(0, 0),)):
        sink = changed(
            engine(), lambda t, u=units: msgspec.structs.replace(t, units=u) if t.component == "v" else t
        )
        source = changed(engine(), lambda t: None if t.component == "v" else t)
        pieces = [
            p for lane in plan_between(sink, source).group_reads for s in lane.patterns for p in s.extents
        ]
        assert {piece.component for piece in pieces} == {"k"}
