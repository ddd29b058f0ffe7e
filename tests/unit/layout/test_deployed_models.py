"""Deployments of small models in every way that a deployment may choose: each is a valid engine."""

from __future__ import annotations

import pytest

from kvxferd.ids import Rank
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.layout.presets import MODELS, DeploymentOptions, deploy
from kvxferd.layout.validate import validate_layout
from kvxferd.plan import check_engine

Engine = dict[Rank, tuple[EngineSpec, RankLayout]]

NUM_BLOCKS = 14
DRAFT = MODELS["tiny-quantised"]


def engine(name: str, choices: DeploymentOptions) -> Engine:
    """Return every rank, valid and complete."""
    ranks = deploy(MODELS[name], choices)
    for spec, layout in ranks.values():
        validate_layout(spec, layout)
    check_engine(ranks)
    return ranks


def choices(**chosen: object) -> DeploymentOptions:
    """Return small blocks unless told otherwise."""
    return DeploymentOptions(**({"block_tokens": 4, "num_blocks": NUM_BLOCKS} | chosen))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stages", "ends"), [((3, 1), [3, 4]), ((1, 0, 3), [1, 1, 4])], ids=["uneven", "one that is empty"]
)
def test_stages_have_the_layers_that_they_are_given(stages: tuple[int, ...], ends: list[int]) -> None:
    made = engine("tiny-dense", choices(pp=len(stages), stages=stages))
    assert [layout.end_layer for _, layout in made.values()] == ends


def test_groups_with_block_counts_of_their_own() -> None:
    """By name; a group without a number is refused, and pages that are shared have one count."""
    made = engine("tiny-sliding", choices(num_blocks={"full": 9, "sliding": 3}))
    assert {g.name: g.num_blocks for g in made[Rank(0, 0)][1].groups} == {"full": 9, "sliding": 3}
    with pytest.raises(ValueError, match="lacks group 'sliding'"):
        engine("tiny-sliding", choices(num_blocks={"full": 9}))
    apart = {"full": 9, "state.0": 2}
    assert engine("tiny-gdn", choices(num_blocks=apart, shared_pages=False))
    with pytest.raises(ValueError, match="share their pages"):
        engine("tiny-gdn", choices(num_blocks={"full": 9, "state.0": 2, "state.1": 2}))


def test_a_draft_models_layers_come_last_with_heads_of_their_own() -> None:
    """Four layers of the target, then two of the draft, on the last stage alone."""
    ranks = engine("tiny-dense", choices(tp=2, pp=2, draft=DRAFT))
    first, last = ranks[Rank(0, 0)][1], ranks[Rank(1, 0)][1]
    assert (first.start_layer, first.end_layer, last.start_layer, last.end_layer) == (0, 2, 2, 6)
    assert sorted({t.layer for t in last.tensors if t.group == "draft.full"}) == [4, 5]
    assert [g.name for g in first.groups] == ["full", "draft.full"]
    assert {t.dtype for t in last.tensors if t.layer >= 4} == {"int8"}


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"layout": "DNH"}, "'DNH'"),
        ({"layout": "HND+XS"}, "behind the +"),
        ({"tp": 0}, "tp 0"),
        ({"num_blocks": 0}, "num_blocks 0"),
        ({"pp": 2, "stages": (1, 2, 1)}, "3 stages: pp is 2"),
        ({"pp": 2, "stages": (1, 2)}, "the model has 4"),
        ({"cp": 2, "interleave": 3}, "interleave 3"),
    ],
)
def test_what_no_engine_could_be(chosen: dict[str, object], words: str) -> None:
    """Refused with the value."""
    with pytest.raises(ValueError, match=words.replace("+", r"\+")):
        engine("tiny-dense", choices(**chosen))


@pytest.mark.parametrize("layout", ["cross-layer", "BLHNC", "BHLNC", "LHBNC", "vectorised"])
def test_arrangements_that_shared_pages_cannot_have(layout: str) -> None:
    """K and V of one layer share a page with its states."""
    with pytest.raises(ValueError, match="shared pages"):
        engine("tiny-gdn", choices(layout=layout))
