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


def dealt_out(*shards: TokenShard) -> Engine:
    """Return ranks of one engine, each with its group's tokens sharded so."""
    spec, layout = engine()[Rank(0, 0)]
    groups = [(msgspec.structs.replace(layout.groups[0], token_shard=shard),) for shard in shards]
    return {
        Rank(0, i): (spec, msgspec.structs.replace(layout, groups=group)) for i, group in enumerate(groups)
    }


@pytest.mark.parametrize(
    ("source", "sink", "code", "words"),
    [
        (
            dealt_out(TokenShard(3, 0, 2), TokenShard(3, 2, 2)),
            engine(),
            Code.COVERAGE_GAP,
            "token range [2, 4) of every 6",
        ),
        (
            dealt_out(TokenShard(2, 0, 1), TokenShard(3, 1, 1)),
            engine(),
            Code.LAYOUT_INCOMPATIBLE,
            "(2, 1), (3, 1) at the source",
        ),
        # The common period is astronomical: refused, not computed.
        (
            dealt_out(TokenShard(1013, 0, 1019)),
            dealt_out(TokenShard(1009, 0, 1021)),
            Code.LAYOUT_INCOMPATIBLE,
            "too rarely",
        ),
    ],
    ids=["a shard is missing", "ranks differ", "interleavings that never meet again"],
)
def test_token_shards_that_do_not_fit_are_refused(
    source: Engine, sink: Engine, code: Code, words: str
) -> None:
    error = refusal(source, sink)
    assert error.code is code
    assert words in error.message


def test_units_dealt_out_too_finely_are_refused() -> None:
    """Every second of a quarter of a million channels on each of two ranks."""
    count = 1 << 18
    even = tuple(UnitRange(2 * u, 2 * u + 1) for u in range(count // 2 + 1))
    odd = tuple(UnitRange(2 * u + 1, 2 * u + 2) for u in range(count // 2 + 1))
    sink = changed(
        engine(heads=1, layers=1), lambda t: msgspec.structs.replace(t, units=(UnitRange(0, count + 1),))
    )
    source = {
        Rank(0, i): changed(
            engine(heads=1, layers=1), lambda t, units=units: msgspec.structs.replace(t, units=units)
        )[Rank(0, 0)]
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
