"""The model, the two engines and the requests of a demo, on which its processes must agree."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from kvxferd.errors import Code, EngineError
from kvxferd.ids import EngineId, Generation, Rank
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.layout.presets import attention_layout

GROUP = "full"
ITEMSIZE = 2
# A request takes a random half of each engine's blocks, so hardly two of them are neighbours.
SPARE_FACTOR = 2

Role = Literal["prefill", "decode"]


class EngineShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of one of the two engines."""

    tp: int
    pp: int
    block_tokens: int
    layout: str

    def __str__(self) -> str:
        return f"TP={self.tp} PP={self.pp}, {self.block_tokens}-token blocks, {self.layout}"


class DemoShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model, both engines and the requests."""

    prefill: EngineShape
    decode: EngineShape
    heads: int
    head_dim: int
    layers: int
    requests: int
    tokens: int

    def engine(self, role: Role) -> EngineShape:
        """Return that engine's shape."""
        return self.prefill if role == "prefill" else self.decode

    @property
    def equal(self) -> DemoShape:
        """The same model and requests between two engines like this decode engine."""
        return msgspec.structs.replace(self, prefill=self.decode)

    def differences(self) -> list[str]:
        """Return in what the two engines differ."""
        mine, theirs = self.prefill, self.decode
        orders = [engine.layout.partition("-")[0] for engine in (mine, theirs)]
        named = (
            ("the order of heads and tokens", "NHD" in orders and orders[0] != orders[1]),
            ("the layout", mine.layout != theirs.layout and "NHD" not in orders),
            ("the block size", mine.block_tokens != theirs.block_tokens),
            ("the tensor-parallel size", mine.tp != theirs.tp),
            ("the pipeline stages", mine.pp != theirs.pp),
        )
        return [name for name, differs in named if differs]

    def ranks(self, role: Role) -> list[Rank]:
        """Return every rank of that engine, stage by stage."""
        engine = self.engine(role)
        return [Rank(pp, tp) for pp in range(engine.pp) for tp in range(engine.tp)]

    def num_blocks(self, role: Role) -> int:
        """Return how many blocks a request takes in that engine."""
        return -(-self.tokens // self.engine(role).block_tokens)

    def pool_blocks(self, role: Role) -> int:
        """Return how many blocks a rank's memory holds."""
        return SPARE_FACTOR * self.num_blocks(role)

    def spec(self, role: Role, rank: Rank) -> EngineSpec:
        """Return the engine spec that one rank registers with."""
        engine = self.engine(role)
        return EngineSpec(
            engine_id=EngineId(f"demo-{role}"),
            generation=Generation("1"),
            num_layers=self.layers,
            pp_size=engine.pp,
            tp_size=engine.tp,
            pp_rank=rank.pp_rank,
            tp_rank=rank.tp_rank,
            num_kv_heads=self.heads,
            fingerprint="demo",
        )

    def rank_layout(self, role: Role, rank: Rank) -> RankLayout:
        """Return the layout of one rank's part of the cache."""
        engine = self.engine(role)
        return attention_layout(
            spec=self.spec(role, rank),
            num_kv_heads=self.heads,
            head_dim=self.head_dim,
            itemsize=ITEMSIZE,
            block_tokens=engine.block_tokens,
            num_blocks=self.pool_blocks(role),
            layout=engine.layout,
        )

    def block_ids(self, role: Role, request: int) -> npt.NDArray[np.int32]:
        """Return a request's block ids: random ones, the same for every rank of the engine."""
        seed = [request, 0 if role == "prefill" else 1]
        chosen = np.random.default_rng(seed).permutation(self.pool_blocks(role))
        return chosen[: self.num_blocks(role)].astype(np.int32)

    def check(self) -> None:
        """Raise EngineError if a rank would hold no layer."""
        for role in ("prefill", "decode"):
            engine = self.engine(role)
            if engine.pp > self.layers:
                raise EngineError(
                    f"cannot run the demo: --{role}-pp {engine.pp} is more than --layers {self.layers}",
                    Code.LAYOUT_INVALID,
                )
