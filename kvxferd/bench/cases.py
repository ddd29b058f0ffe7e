"""What is moved: the cache of a known model's rank, and which of its blocks a pull takes on each side."""

from __future__ import annotations

import dataclasses
import math
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvxferd.ids import GroupName, Rank, RegionId
from kvxferd.layout import GroupKind, PackedBlocks, RankLayout, block_bytes
from kvxferd.layout.presets import LayerKind, ModelFacts, StateComponent, TokenComponent, find_model
from kvxferd.plan import Expander, Runs, make_plan
from kvxferd.tooling.content import RequestBlocks
from kvxferd.tooling.engine_pair import EnginePair, EngineShape, Role

BlockIds = npt.NDArray[np.int32]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
FIRST_RANK = Rank(0, 0)
BLOCKS_PER_RUN = 4
# With fewer blocks a list could hardly be anything but contiguous.
_BLOCKS_PER_LIST = 8
# The ends of each block are checked, unless a pull has more: 2 GiB in blocks of 64 KiB are 32,768.
_MAX_CHECKED = 4096

# A tiny cache for requests with very many blocks, to measure the cost of a call and not that of a byte.
_IDS = ModelFacts("ids", 0, (LayerKind.FULL,), ((TokenComponent("latent", 1, 4, is_replicated=True),),))


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The cache that one rank of a model's usual deployment holds."""

    model: str
    tp: int
    block_tokens: int

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
        """Whether it has attention and states, in shared pages: then it has all layers or none."""
        return bool(self.facts(1 << 20, 1).states)


SHAPES: dict[str, ModelShape] = {
    "llama-3-70b": ModelShape("llama-3-70b", 8, 16),
    "qwen3-8b": ModelShape("qwen3-8b", 1, 16),
    "deepseek-v3": ModelShape("deepseek-v3", 1, 64),
    "mamba2-hybrid": ModelShape("nemotron-h-8b", 1, 16),
}
IDS_SHAPE = "ids"
_BY_NAME = SHAPES | {IDS_SHAPE: ModelShape(IDS_SHAPE, 1, 16)}


def equal_engines(name: str, shape: str, layers: int, pool_blocks: int = 1, ranks: int = 1) -> EnginePair:
    """Return two engines alike, of ranks as the shape says. `name`: new for each pair of engines."""
    model, tokens = _BY_NAME[shape], pool_blocks * _BY_NAME[shape].block_tokens
    engine = EngineShape(ranks, 1, model.block_tokens, "HND")
    return EnginePair(model.facts(layers, ranks), engine, engine, tokens, name, tokens)


def with_pool(pair: EnginePair, name: str, pool_blocks: int) -> EnginePair:
    """Return the pair under another name, with so many blocks on the prefill side."""
    tokens = pool_blocks * pair.prefill.block_tokens
    return dataclasses.replace(pair, name=name, num_tokens=tokens, pool_tokens=tokens)


class Footprint(NamedTuple):
    """The bytes of a request on one rank, as far as the layout determines them."""

    block_bytes: int  # of one id of the attention group, all layers
    state_bytes: int  # of one request's states, all layers
    num_state_groups: int
    block_tokens: int


def footprint(pair: EnginePair, role: Role = "prefill") -> Footprint:
    """Return the footprint of that engine's first rank, which has one attention group."""
    layout = layout_of(pair, role)
    sizes = block_bytes(layout)
    states = [group for group in layout.groups if group.kind is GroupKind.STATE]
    (attention,) = (group for group in layout.groups if group.kind is GroupKind.ATTENTION)
    return Footprint(
        block_bytes=sizes[attention.name],
        state_bytes=sum(sizes[group.name] for group in states),
        num_state_groups=len(states),
        block_tokens=attention.block_tokens,
    )


def layout_of(pair: EnginePair, role: Role = "prefill") -> RankLayout:
    """Return the layout of that engine's first rank."""
    return pair.engine(role)[FIRST_RANK][1]


def layers_for(shape_name: str, size_bytes: int) -> int:
    """Return how many layers a rank has for pulls of this size: all, or few enough for several blocks.

    A block of all layers is 0.6 to 8 MiB. Smaller pulls use fewer layers, as those of a
    pipeline stage, so that each has about `_BLOCKS_PER_LIST` blocks.
    """
    shape = _BY_NAME[shape_name]
    if shape.is_hybrid:
        return shape.num_layers
    layer_bytes = footprint(equal_engines("one", shape_name, 1)).block_bytes
    return max(1, min(shape.num_layers, size_bytes // (_BLOCKS_PER_LIST * layer_bytes)))


def blocks_for(pair: EnginePair, size_bytes: int) -> int:
    """Return the number of blocks that comes closest to a size; 0 if the states alone are larger."""
    of = footprint(pair)
    return max(0, round((size_bytes - of.state_bytes) / of.block_bytes))


def ids_per_pull(pair: EnginePair, blocks: int) -> int:
    """Return how many ids of the pool one pull takes, all groups together, in whole runs of four."""
    total = blocks + footprint(pair).num_state_groups
    return -(-total // BLOCKS_PER_RUN) * BLOCKS_PER_RUN


class BlockPattern(StrEnum):
    """How a request's blocks lie in the pool, on both sides."""

    CONTIGUOUS = "contiguous"
    FRAGMENTED = "fragmented"  # runs of four
    SCATTERED = "scattered"


@dataclasses.dataclass(frozen=True)
class Case:
    """Pulls of one size: `slots` of them have no block in common and may run at the same time."""

    pair: EnginePair
    pattern: BlockPattern
    blocks: int  # ids of the attention group in one pull, on the prefill side
    slots: int = 1
    first_block: int = 0  # where this case's part of the pool begins, for two cases side by side

    @property
    def num_tokens(self) -> int:
        """The tokens of one pull."""
        return self.blocks * footprint(self.pair).block_tokens

    @property
    def ends_of(self) -> int:
        """Of so many tokens the first and the last are checked in each round: whole blocks on both sides."""
        whole = math.lcm(footprint(self.pair).block_tokens, footprint(self.pair, "decode").block_tokens)
        return whole * max(1, self.num_tokens // whole // _MAX_CHECKED)

    def blocks_of(self, role: Role) -> int:
        """Return the ids of the attention group in one pull on that side."""
        return self.num_tokens // footprint(self.pair, role).block_tokens

    def request(self, role: Role, slot: int, number: int = 0) -> RequestBlocks:
        """Return one slot's blocks on one side, whose content is that of `number`."""
        ids = block_lists(self, role, slot)
        return RequestBlocks(number * self.slots + slot, ids, self.num_tokens)


def block_lists(case: Case, role: Role, slot: int) -> dict[str, BlockIds]:
    """Return one pull's ids by group, on one side.

    Attention takes the first ids of the slot and each state group takes one of the rest: in a hybrid all
    of them are pages of one pool.
    """
    blocks = case.blocks_of(role)
    taken = ids_per_pull(case.pair, blocks)
    own = _pool_ids(case, role)[slot * taken : (slot + 1) * taken]
    lists: dict[str, BlockIds] = {}
    rest = blocks
    for group in layout_of(case.pair).groups:
        if group.kind is GroupKind.STATE:
            lists[group.name] = own[rest : rest + 1]
            rest += 1
        else:
            lists[group.name] = own[:blocks]
    return lists


@lru_cache(maxsize=4)
def _pool_ids(case: Case, role: Role) -> BlockIds:
    """Return the ids of all slots in order."""
    needed = case.slots * ids_per_pull(case.pair, case.blocks_of(role))
    room = case.pair.num_blocks(role) - case.first_block
    if needed > room:
        raise ValueError(f"cannot list {needed} blocks: the pool has {room}")
    if case.pattern is BlockPattern.CONTIGUOUS:
        return np.arange(case.first_block, case.first_block + needed, dtype=np.int32)
    run = BLOCKS_PER_RUN if case.pattern is BlockPattern.FRAGMENTED else 1
    # Each side has its own permutation of the pool: neighbours on one are not neighbours on the other.
    drawn = np.random.default_rng([run, role == "decode"]).permutation(room // run)[: needed // run]
    return (case.first_block + drawn[:, None] * run + np.arange(run)).ravel().astype(np.int32)


def runs_of(case: Case, slot: int) -> Runs:
    """Return what one pull between equal engines of one rank moves, as offsets in the two regions.

    This is what the mover posts, sorted and merged, up to the cutting of long runs.
    """
    layout = layout_of(case.pair)
    states = {group.name for group in layout.groups if group.kind is GroupKind.STATE}
    at_zero = {RegionId(region.region): 0 for region in layout.regions}
    decode, prefill = (
        {
            GroupName(name): PackedBlocks(ids.tobytes(), state_at=case.num_tokens if name in states else -1)
            for name, ids in block_lists(case, role, slot).items()
        }
        for role in ("decode", "prefill")
    )
    found = _expander(case.pair).expand(decode, prefill, case.num_tokens, at_zero, {FIRST_RANK: at_zero})
    return found[FIRST_RANK]


@lru_cache(maxsize=4)
def _expander(pair: EnginePair) -> Expander:
    spec, layout = pair.engine("decode")[FIRST_RANK]
    source_spec, source_layout = pair.engine("prefill")[FIRST_RANK]
    return Expander(make_plan(spec, layout, source_spec, {FIRST_RANK: source_layout}))
