"""Two engines of one model: their ranks, and a request's blocks."""

from __future__ import annotations

import numpy as np

from kvxferd.ids import Rank
from kvxferd.layout.presets import LayerKind, ModelFacts, key_and_value
from kvxferd.tooling.engine_pair import EnginePair, EngineShape

MODEL = ModelFacts("small", 4, (LayerKind.FULL,) * 3, key_and_value(4, 8))
PAIR = EnginePair(
    model=MODEL,
    prefill=EngineShape(tp=4, pp=2, block_tokens=4, layout="HND"),
    decode=EngineShape(tp=2, pp=1, block_tokens=8, layout="NHD"),
    num_tokens=400,
    name="test",
)


def test_each_engine_is_deployed_as_its_shape_says() -> None:
    prefill, decode = PAIR.engine("prefill"), PAIR.engine("decode")
    assert list(prefill) == [Rank(pp, tp) for pp in range(2) for tp in range(4)]
    assert list(decode) == [Rank(0, 0), Rank(0, 1)]
    spec, layout = prefill[Rank(1, 3)]
    assert (spec.engine_id, spec.rank, spec.pp_size, spec.tp_size) == ("test-prefill", Rank(1, 3), 2, 4)
    assert layout.groups[0].block_tokens == 4
    assert layout.groups[0].num_blocks == 200  # twice a request's
    assert decode[Rank(0, 0)][0].engine_id == "test-decode"
    assert decode[Rank(0, 0)][0].fingerprint == spec.fingerprint
    equal = PAIR.equal("same")
    assert equal.prefill == equal.decode == PAIR.decode
    assert equal.engine("prefill")[Rank(0, 0)][0].engine_id == "same-prefill"


def test_blocks_are_scattered_and_the_same_for_every_rank() -> None:
    ids = PAIR.block_ids("prefill", 0)["full"]
    assert len(set(ids.tolist())) == len(ids) == 100
    assert np.count_nonzero(np.diff(ids) == 1) < 5
    assert (ids == PAIR.block_ids("prefill", 0)["full"]).all()
    assert (ids != PAIR.block_ids("prefill", 1)["full"]).any()
