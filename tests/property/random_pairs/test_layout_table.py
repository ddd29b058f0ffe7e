"""Every kind of cache that engines keep, between unlike deployments, both ways, through real movers.

What cannot be read is refused by name, field by field with both values.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from kvxferd.errors import LayoutError, PlanError
from kvxferd.ids import Rank
from kvxferd.layout.presets import MODELS
from kvxferd.layout.presets.deploy import Ranks, with_kv_dtype
from kvxferd.layout.validate import validate_layout
from kvxferd.plan import check_blocks, make_plan
from tests.support.checked_pull import transfer
from tests.support.layout_table import DENSE, MLA, NUM_TOKENS, TABLE, engine, lists
from tests.support.mover_pair import Movers

pytestmark = pytest.mark.process


def read_all(movers: Movers, sink: Ranks, source: Ranks, first_token: int = 0) -> int:
    """Every rank of the sink reads the source; returns all bytes moved."""
    mine, theirs = lists(sink, 1, first_token), lists(source, 5)
    remote = {rank: held[1] for rank, held in source.items()}
    moved = 0
    for spec, layout in sink.values():
        own = {group.name: mine[group.name] for group in layout.groups}
        check_blocks(layout, own, NUM_TOKENS)
        moved += transfer(
            movers,
            spec,
            layout,
            source[Rank(0, 0)][0],
            remote,
            mine=own,
            theirs=theirs,
            num_tokens=NUM_TOKENS,
        )
    return moved


@pytest.mark.parametrize("row", TABLE)
def test_a_row_works_both_ways(movers: Movers, row: str) -> None:
    model, one, other = TABLE[row]
    first, second = engine(model, **one), engine(model, **other)
    assert read_all(movers, first, second) > 0
    assert read_all(movers, second, first) > 0


def test_a_draft_models_layers_travel_beside_the_targets(movers: Movers) -> None:
    draft = dataclasses.replace(MODELS[DENSE], name="draft", kinds=MODELS[DENSE].kinds[:1])
    first = engine(DENSE, draft=draft)
    assert read_all(movers, first, engine(DENSE, draft=draft, tp=2, layout="NHD")) > 0


def test_a_prefix_hit_moves_only_the_missing_tokens(movers: Movers) -> None:
    sink, source = engine(DENSE), engine(DENSE, tp=2)
    whole = read_all(movers, sink, source)
    blocks = -(-NUM_TOKENS // 4)
    assert read_all(movers, sink, source, first_token=20) == whole * (blocks - 5) // blocks


def other(model: str, **changes: Any) -> Any:
    return dataclasses.replace(MODELS[model], **changes)


REFUSED = {
    "dtype": (with_kv_dtype(MODELS[DENSE], "float8_e4m3fn", 1), ["bfloat16", "float8_e4m3fn"]),
    "missing layers": (other(DENSE, kinds=MODELS[DENSE].kinds[:-1]), ["layer"]),
    "another model": (MODELS[MLA], ["fingerprint", "tiny-dense", "tiny-mla", "num_kv_heads"]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_refused_with_both_values(what: str) -> None:
    model, named = REFUSED[what]
    sink, source = engine(DENSE), engine(model)
    remote = {rank: held[1] for rank, held in source.items()}
    spec, layout = sink[Rank(0, 0)]
    with pytest.raises(PlanError) as raised:
        make_plan(spec, layout, source[Rank(0, 0)][0], remote)
    assert all(word in raised.value.message for word in named), raised.value.message


@pytest.mark.parametrize(
    ("model", "component", "change", "named"),
    [
        (
            DENSE,
            "k",
            {"encoding": "swizzled-32"},
            ["encoding", "swizzled-32"],
        ),  # equal strides, other meaning
        (DENSE, "v", {"chunk_bytes": 2}, ["content", "2"]),  # bytes of a head
        (DENSE, "v", {"itemsize": 1}, ["itemsize"]),
        (MLA, "indexer.scale", {"granule_tokens": 2}, ["granule"]),
        ("tiny-mamba2", "conv.x", {"num_chunks": 1, "chunk_bytes": 8}, ["conv.x", "8"]),  # speculative rows
    ],
)
def test_a_component_that_differs_is_named_with_both_values(
    model: str, component: str, change: dict[str, Any], named: list[str]
) -> None:
    sink, source = engine(model), engine(model)
    spec, layout = source[Rank(0, 0)]
    tensors = tuple(
        msgspec.structs.replace(t, **change) if t.component == component else t for t in layout.tensors
    )
    remote = {Rank(0, 0): msgspec.structs.replace(layout, tensors=tensors)}
    with pytest.raises(PlanError) as raised:
        make_plan(*sink[Rank(0, 0)], spec, remote)
    assert all(word in raised.value.message for word in [component, *named]), raised.value.message


def test_overlap_is_refused_inside_a_group_and_legal_between_groups() -> None:
    hybrid = engine("tiny-mamba2", shared_pages=True)  # validated: attention and states overlay one another
    spec, layout = hybrid[Rank(0, 0)]
    groups = {t.group for t in layout.tensors}
    assert len(groups) > 1
    first, second = (t for t in layout.tensors if t.component in ("k", "v") and t.layer == 2)
    onto = msgspec.structs.replace(second, offset=first.offset)
    tensors = tuple(onto if t is second else t for t in layout.tensors)
    with pytest.raises(LayoutError, match="overlap"):
        validate_layout(spec, msgspec.structs.replace(layout, tensors=tensors))
