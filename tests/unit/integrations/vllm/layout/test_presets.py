"""A preset describes the caches that the connector derives of the same model in vLLM: each reads the other.

By design two things are a deployment's own: the names of groups, and how many groups share layers that are
alike. A preset's fingerprint is its name, which an operator gives vLLM's engine as `model_fingerprint`.
"""

from __future__ import annotations

import pytest

from kvxferd.ids import Rank
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.layout.presets import MODELS, deploy
from kvxferd.layout.validate import validate_layout
from kvxferd.plan import check_engine, make_plan
from tests.support.vllm_models import VLLM_MODELS

Engine = dict[Rank, tuple[EngineSpec, RankLayout]]


def preset(name: str, tp: int) -> Engine:
    """Return a preset's engine, with the caches of a hybrid in groups of their own."""
    return deploy(name, tp=tp, num_blocks=2, shared_pages=False)


def facts_of(layout: RankLayout) -> dict[tuple[int, str], object]:
    """Return everything that two holders of a component must have alike, of each component of each layer."""
    groups = {group.name: group for group in layout.groups}
    return {
        (t.layer, t.component): (
            t.units,
            t.content_bytes,
            t.granule_tokens,
            t.itemsize,
            t.dtype,
            t.encoding,
            groups[t.group].kind,
            groups[t.group].sliding_window,
        )
        for t in layout.tensors
    }


def partition(layout: RankLayout) -> set[frozenset[tuple[int, str]]]:
    """Return which components are in a group together."""
    return {
        frozenset((t.layer, t.component) for t in layout.tensors if t.group == group.name)
        for group in layout.groups
    }


def test_each_preset_of_a_model_of_vllm_is_compared() -> None:
    assert VLLM_MODELS.keys() == {name for name in MODELS if not name.startswith("tiny-")}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", VLLM_MODELS)
def test_the_connector_derives_what_the_preset_describes(name: str, tp: int) -> None:
    engine, described = VLLM_MODELS[name].engine(name, tp), preset(name, tp)
    check_engine(engine)
    for rank, (spec, layout) in engine.items():
        validate_layout(spec, layout)
        other = described[rank][1]
        assert facts_of(layout) == facts_of(other)
        assert partition(layout) == partition(other)


@pytest.mark.parametrize("name", VLLM_MODELS)
def test_each_reads_from_the_other(name: str) -> None:
    live, described = VLLM_MODELS[name].engine(name, 2), preset(name, 1)
    for sink, source in ((live, described), (described, live)):
        for spec, layout in sink.values():
            theirs = {rank: other for rank, (_, other) in source.items()}
            assert make_plan(spec, layout, source[Rank(0, 0)][0], theirs).group_reads
