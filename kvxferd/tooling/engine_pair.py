"""Two engines of one model, deployed differently or alike: what their ranks and a request's blocks are."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvxferd.ids import Rank
from kvxferd.layout import EngineSpec, GroupKind, RankLayout
from kvxferd.layout.presets import ModelFacts, deploy

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")
# A request takes a random half of each engine's blocks, so hardly two of them are neighbours.
_SPARE_FACTOR = 2


@dataclasses.dataclass(frozen=True)
class EngineShape:
    """How one of the engines is deployed."""

    tp: int
    pp: int
    block_tokens: int
    layout: str  # a name of LAYOUT_NAMES

    def __str__(self) -> str:
        return f"TP={self.tp} PP={self.pp}, {self.block_tokens}-token blocks, {self.layout}"


@dataclasses.dataclass(frozen=True)
class EnginePair:
    """The model, both engines, and the size of a request. A request has blocks of every group."""

    model: ModelFacts
    prefill: EngineShape
    decode: EngineShape
    num_tokens: int  # of a request
    name: str  # of the engines, before "-prefill" and "-decode"
    pool_tokens: int = 0  # for which an engine has blocks in each group; 0: twice a request's

    def shape(self, role: Role) -> EngineShape:
        """Return how that engine is deployed."""
        return self.prefill if role == "prefill" else self.decode

    def equal(self, name: str) -> EnginePair:
        """Return the same model and requests between two engines like this decode engine."""
        return dataclasses.replace(self, prefill=self.decode, name=name)

    def engine(self, role: Role) -> dict[Rank, tuple[EngineSpec, RankLayout]]:
        """Return what each rank of that engine registers with, stage by stage."""
        return _engine(self, role)

    def block_ids(self, role: Role, request: int) -> dict[str, npt.NDArray[np.int32]]:
        """Return a request's block ids by group: random ones, the same for every rank of the engine."""
        count = -(-self.num_tokens // self.shape(role).block_tokens)
        _, layout = next(iter(self.engine(role).values()))
        chosen: dict[str, npt.NDArray[np.int32]] = {}
        for number, group in enumerate(layout.groups):
            drawn = np.random.default_rng([request, ROLES.index(role), number]).permutation(group.num_blocks)
            taken = 1 if group.kind is GroupKind.STATE else count
            chosen[group.name] = drawn[:taken].astype(np.int32)
        return chosen

    def num_blocks(self, role: Role) -> int:
        """Return how many ids each group of that engine has."""
        if self.pool_tokens:
            return self.pool_tokens // self.shape(role).block_tokens
        return _SPARE_FACTOR * -(-self.num_tokens // self.shape(role).block_tokens)


@lru_cache(maxsize=16)
def _engine(pair: EnginePair, role: Role) -> dict[Rank, tuple[EngineSpec, RankLayout]]:
    shape = pair.shape(role)
    return deploy(
        pair.model,
        tp=shape.tp,
        pp=shape.pp,
        layout=shape.layout,
        block_tokens=shape.block_tokens,
        num_blocks=pair.num_blocks(role),
        engine_id=f"{pair.name}-{role}",
        generation="1",
    )
