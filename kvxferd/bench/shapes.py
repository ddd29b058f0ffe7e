"""Per-rank caches of known models, deployed alike on both sides."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Literal

import msgspec

from kvxferd.ids import Rank
from kvxferd.layout import EngineSpec, GroupKind, RankLayout, block_bytes
from kvxferd.layout.presets import LayerKind, ModelFacts, StateComponent, TokenComponent, deploy, find_model

Role = Literal["source", "sink"]
FIRST_RANK = Rank(0, 0)
ROLES: tuple[Role, ...] = ("source", "sink")

# With fewer blocks a list could hardly be anything but contiguous.
BLOCKS_PER_LIST = 8

# A tiny cache for requests with very many blocks, to measure the cost of a call and not that of a byte.
_IDS = ModelFacts("ids", 0, (LayerKind.FULL,), ((TokenComponent("latent", 1, 4, is_replicated=True),),))


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The cache that one rank of a model's usual deployment holds."""

    model: str
    tp: int
    block_tokens: int
    title: str

    def facts(self, layers: int, ranks: int) -> ModelFacts:
        """Return `ranks` such ranks as one model, with its first layers only.

        Heads and state channels are those of one rank of `tp`, times `ranks`; a deployment of it at
        TP=ranks gives each the same cache.
        """
        model = _IDS if self.model == _IDS.name else find_model(self.model)

        def share(count: int) -> int:
            return max(1, count // self.tp) * ranks

        def of_tokens(part: TokenComponent) -> TokenComponent:
            return part if part.is_replicated else dataclasses.replace(part, num_heads=share(part.num_heads))

        def of_states(part: StateComponent) -> StateComponent:
            return dataclasses.replace(part, num_units=share(part.num_units))

        return dataclasses.replace(
            model,
            name=f"{model.name} TP{self.tp}",
            kinds=model.kinds[:layers],
            num_kv_heads=share(model.num_kv_heads) if model.num_kv_heads else 0,
            token_arrays=tuple(tuple(map(of_tokens, array)) for array in model.token_arrays),
            states=tuple(map(of_states, model.states)),
        )

    @property
    def num_layers(self) -> int:
        """The number of layers of the whole model."""
        return self.facts(1 << 20, 1).num_layers

    @property
    def is_hybrid(self) -> bool:
        """Whether it has attention and states, in shared pages: then it has all layers or none, as HND."""
        return bool(self.facts(1 << 20, 1).states)


SHAPES: dict[str, ModelShape] = {
    "llama-3-70b": ModelShape("llama-3-70b", 8, 16, "Llama-3-70B, a rank of TP8"),
    "qwen3-8b": ModelShape("qwen3-8b", 1, 16, "Qwen3-8B, TP1"),
    "deepseek-v3": ModelShape("deepseek-v3", 1, 64, "DeepSeek-V3, MLA"),
    "mamba2-hybrid": ModelShape("nemotron-h-8b", 1, 16, "Nemotron-H-8B, Mamba2 and attention"),
}
IDS_SHAPE = "ids"
_BY_NAME = SHAPES | {IDS_SHAPE: ModelShape(IDS_SHAPE, 1, 16, "64 bytes a block")}


class EngineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one side is deployed where the two sides differ."""

    layout: str
    block_tokens: int
    tp: int = 1
    pp: int = 1

    def __str__(self) -> str:
        parallel = f" TP{self.tp}" * (self.tp > 1) + f" PP{self.pp}" * (self.pp > 1)
        return f"{self.layout}/{self.block_tokens}{parallel}"


class BenchDeployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An engine of one shape, and an engine on the other side: an equal one, unless options are given."""

    name: str  # new for each pair of engines
    shape: str
    layers: int  # all of the model, or a stage's worth for small pulls
    pool_blocks: int  # ids of every group
    ranks: int = 1
    layout_name: str = "HND"  # a name of LAYOUT_NAMES, on both sides
    source: EngineOptions | None = None  # both or none: then these say what `ranks` would
    sink: EngineOptions | None = None

    def engine(self, role: Role) -> dict[Rank, tuple[EngineSpec, RankLayout]]:
        """Return spec and layout of every rank of one side's engine."""
        return _engine(self, role)

    def layout(self, rank: Rank = FIRST_RANK, role: Role = "source") -> RankLayout:
        """Return one rank's layout, which is the same on both sides unless there are options."""
        return self.engine(role)[rank][1]

    def pool_of(self, role: Role) -> int:
        """Return how many ids every group of that side has."""
        if self.source is None or self.sink is None or role == "source":
            return self.pool_blocks
        return self.pool_blocks * self.source.block_tokens // self.sink.block_tokens

    @property
    def region_bytes(self) -> int:
        """The memory of one rank, on one side."""
        return self.layout().regions[0].size_bytes


@lru_cache(maxsize=16)
def _engine(deployment: BenchDeployment, role: Role) -> dict[Rank, tuple[EngineSpec, RankLayout]]:
    shape = _BY_NAME[deployment.shape]
    options = deployment.source if role == "source" else deployment.sink
    if options is None:
        options = EngineOptions(deployment.layout_name, shape.block_tokens, deployment.ranks)
    ranks = deploy(
        shape.facts(deployment.layers, deployment.ranks),
        tp=options.tp,
        pp=options.pp,
        layout=options.layout,
        block_tokens=options.block_tokens,
        num_blocks=deployment.pool_of(role),
        engine_id=f"{deployment.name}-{role}",
    )
    return {
        rank: (msgspec.structs.replace(spec, publish_implies_ready=True), layout)
        for rank, (spec, layout) in ranks.items()
    }


class Footprint(msgspec.Struct, frozen=True):
    """The bytes of a request on one rank, as far as the layout determines them."""

    block_bytes: int  # of one id of the attention group, all layers
    state_bytes: int  # of one request's states, all layers
    num_state_groups: int
    block_tokens: int


def footprint(layout: RankLayout) -> Footprint:
    """Return the footprint of a layout with one attention group."""
    sizes = block_bytes(layout)
    states = [group for group in layout.groups if group.kind is GroupKind.STATE]
    attention = [group for group in layout.groups if group.kind is GroupKind.ATTENTION]
    return Footprint(
        block_bytes=sum(sizes[group.name] for group in attention),
        state_bytes=sum(sizes[group.name] for group in states),
        num_state_groups=len(states),
        block_tokens=attention[0].block_tokens if attention else 0,
    )


def layers_for(shape_name: str, size_bytes: int) -> int:
    """Return how many layers a rank has for pulls of this size: all, or few enough for several blocks.

    A block of all layers is 0.6 to 8 MiB. Smaller pulls use fewer layers, as those of a
    pipeline stage, so that each has about `BLOCKS_IN_A_LIST` blocks.
    """
    shape = _BY_NAME[shape_name]
    if shape.is_hybrid:
        return shape.num_layers
    one = BenchDeployment(name="one", shape=shape_name, layers=1, pool_blocks=1)
    layer_bytes = footprint(one.layout()).block_bytes
    return max(1, min(shape.num_layers, size_bytes // (BLOCKS_PER_LIST * layer_bytes)))
