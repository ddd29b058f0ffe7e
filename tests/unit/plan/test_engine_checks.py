"""Ranks become an engine only if they state one engine and hold its layers together."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvxferd.errors import Code, EngineError, KvxferdError, PlanError
from kvxferd.ids import Rank
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.plan import check_engine, check_same_engine, set_xfer_handshake_metadata_pp_aware
from tests.support.attention_engines import engine, spec

Engine = dict[Rank, tuple[EngineSpec, RankLayout]]


def with_layers(made: Engine, rank: tuple[int, int], start: int, end: int) -> Engine:
    """Return the engine with one rank stating other layers."""
    own, layout = made[Rank(*rank)]
    moved = msgspec.structs.replace(layout, start_layer=start, end_layer=end)
    return made | {Rank(*rank): (own, moved)}


def refusal(made: Engine) -> KvxferdError:
    """Return the error of checking an engine."""
    with pytest.raises(EngineError) as caught:
        check_engine(made)
    return caught.value


@pytest.mark.parametrize(
    ("made", "words"),
    [
        # stages 0-3 and 2-4: layer 2 twice
        (with_layers(engine(pp=2, layers=4), (0, 0), 0, 3), ["stage 1 holds layers [2, 4)", "up to 2"]),
        # a hole between the stages
        (with_layers(engine(pp=2, layers=4), (1, 0), 3, 4), ["layers [2, 3) are held by no stage"]),
        # the last layer is missing
        (with_layers(engine(pp=2, layers=4), (1, 0), 2, 3), ["[0, 3) of 4"]),
        # the first layer is missing
        (with_layers(engine(layers=2), (0, 0), 1, 2), ["layers [0, 1) are held by no stage"]),
        # two ranks of one stage disagree
        (with_layers(engine(tp=2, layers=2), (0, 1), 0, 1), ["pp0.tp0", "[0, 2)", "pp0.tp1", "[0, 1)"]),
    ],
)
def test_layers_must_be_held_exactly_once(made: Engine, words: list[str]) -> None:
    """Named by stage and layer."""
    error = refusal(made)
    assert error.code is Code.LAYERS_MISSING
    assert [word for word in words if word not in error.message] == []


def test_ranks_that_are_missing_are_named() -> None:
    made = engine(tp=2, pp=2)
    del made[Rank(1, 1)]
    error = refusal(made)
    assert error.code is Code.ENGINE_INCOMPLETE
    assert "of its 2 x 2 ranks it lacks pp1.tp1" in error.message


def test_ranks_that_state_another_engine_are_refused_field_by_field() -> None:
    """All fields at once, both values each. A stage's TP is told apart, as its first rank registers."""
    other = msgspec.structs.replace(spec(tp=2, rank=(0, 1)), num_layers=3, fingerprint="x", tp_size=3)
    with pytest.raises(EngineError) as caught:
        check_same_engine(spec(tp=2), other)
    assert caught.value.code is Code.SHAPE_MISMATCH
    for words in ("num_layers is 2 on pp0.tp0 and 3 on pp0.tp1", "fingerprint is '' ", "tp_size is 2 "):
        assert words in caught.value.message
    check_same_engine(spec(tp=2), spec(tp=2, rank=(0, 1)))
    with pytest.raises(EngineError, match=r"tp_size is 2 on pp0.tp0 and 4 on pp1.tp0") as caught:
        check_same_engine(spec(tp=2, pp=2), spec(tp=4, pp=2, rank=(1, 0)))
    assert caught.value.code is Code.UNEQUAL_STAGES


class LegacyConnector:
    """Knows tensor-parallel ranks only."""

    given: Any = None

    def set_xfer_handshake_metadata(self, metadata: dict[Any, str]) -> None:
        self.given = metadata


class StagedConnector(LegacyConnector):
    """Knows pipeline stages too."""

    set_xfer_handshake_metadata_pp_aware = LegacyConnector.set_xfer_handshake_metadata


def test_handshake_metadata_of_one_stage_reaches_a_legacy_connector() -> None:
    """GOLDEN row 3: a worker without metadata is skipped."""
    legacy = LegacyConnector()
    set_xfer_handshake_metadata_pp_aware(legacy, [{(0, 0): "a"}, None, {(0, 1): "b"}])
    assert legacy.given == {0: "a", 1: "b"}


@pytest.mark.parametrize("connector", [LegacyConnector(), StagedConnector()])
def test_two_workers_of_one_rank_are_refused(connector: LegacyConnector) -> None:
    """Merged, the last one would stand for both."""
    with pytest.raises(EngineError, match=r"two workers report pp0.tp1") as caught:
        set_xfer_handshake_metadata_pp_aware(connector, [{(0, 0): "a", (0, 1): "b"}, {(0, 1): "c"}])
    assert caught.value.code is Code.RANK_TAKEN
    assert connector.given is None


def test_handshake_metadata_of_two_stages_needs_a_connector_that_knows_them() -> None:
    """GOLDEN row 3."""
    metadata = [{(0, 0): "a"}, {(1, 0): "b"}]
    legacy, staged = LegacyConnector(), StagedConnector()
    with pytest.raises(ValueError, match="LegacyConnector") as caught:
        set_xfer_handshake_metadata_pp_aware(legacy, metadata)
    assert legacy.given is None
    # The daemon refuses a reader by the same error, with the code of the wire.
    assert isinstance(caught.value, PlanError)
    assert caught.value.code is Code.NOT_PP_AWARE
    set_xfer_handshake_metadata_pp_aware(staged, metadata)
    assert staged.given == {(0, 0): "a", (1, 0): "b"}
