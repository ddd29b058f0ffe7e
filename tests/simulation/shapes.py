"""What an engine of the simulation holds: a small model, a deployment of it, and the blocks of a request.

The layouts are those of `kvxferd.layout.presets`, in a few KiB. Any two deployments of one model can read
each other. An engine has one pool of block ids for all of its groups, because groups may overlay one another.
"""

from __future__ import annotations

import math
import mmap
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvxferd.client import BlockList
from kvxferd.ids import GroupName, Rank, RegionId
from kvxferd.layout import EngineSpec, Group, GroupKind, RankLayout, RegionSpec
from kvxferd.layout.presets import LAYOUT_NAMES, LayerKind, ModelFacts, SideCache, deploy, key_and_value
from kvxferd.layout.presets.deploy import Ranks
from kvxferd.layout.presets.deployment_options import AXIS_ORDERS, CHUNK_BYTES, VECTORISED
from kvxferd.layout.presets.model_facts import gdn_states, mamba1_states, mamba2_states, ring, row
from kvxferd.memory import MemoryPlacement, SealedMemory, SharedMemory
from kvxferd.memory.device import DeviceMemory

if TYPE_CHECKING:
    from typing_extensions import Buffer

TWO_GROUPS_SHARE, STATE_SHARE, LATENT_SHARE, WINDOW_SHARE = 0.33, 0.2, 0.2, 0.1  # of models
SHARDED_SHARE = 0.1  # of deployments share the tokens of a request
PREFIX_HIT_SHARE = 0.3  # of pulls have the first tokens already

Lists = dict[str, BlockList]
_STATES = (
    mamba2_states(num_heads=2, head_dim=2, num_groups=1, state_size=2, rows=2),
    mamba1_states(num_channels=4, state_size=2, rows=2),
    gdn_states(num_key_heads=1, key_dim=2, num_value_heads=2, value_dim=1, rows=2),
    (ring(row_bytes=4, rows=3),),
)


@dataclass(frozen=True)
class RankShape:
    """One rank's spec and layout, and where its regions lie in its memories."""

    spec: EngineSpec
    layout: RankLayout
    memory_bytes: tuple[int, ...]
    places: Mapping[RegionId, tuple[int, int]]  # by region: which memory, and the offset in it

    def views(self, buffers: Sequence[Buffer]) -> dict[RegionId, npt.NDArray[np.uint8]]:
        """Return the bytes of each region in the memories' buffers."""
        return {
            spec.region: np.frombuffer(buffers[number], np.uint8, spec.size_bytes, offset)
            for spec in self.layout.regions
            for number, offset in [self.places[spec.region]]
        }

    def regions(self, memories: Sequence[SealedMemory | DeviceMemory]) -> dict[RegionId, SharedMemory]:
        """Return the memories as `register` and `resume` take them."""
        return {
            spec.region: SharedMemory(memories[number], offset, spec.size_bytes, MemoryPlacement.MEMFD, {})
            for spec in self.layout.regions
            for number, offset in [self.places[spec.region]]
        }


@dataclass(frozen=True)
class Deployment:
    """An engine: what each of its ranks holds. Block ids are 0 to `num_blocks` - 1 in every group."""

    num_blocks: int
    ranks: Mapping[Rank, RankShape]
    groups: Mapping[str, Group]  # of all ranks; of ranks that share tokens the first one's

    @property
    def layouts(self) -> dict[Rank, RankLayout]:
        """Return the layout of every rank."""
        return {rank: shape.layout for rank, shape in self.ranks.items()}


def draw_model(rng: random.Random) -> ModelFacts:
    """Return a model of 1 to 3 layers: most often one attention group, seldom a state."""
    num_layers = rng.choice((1, 2, 2, 3))
    kinds = [LayerKind.FULL] * num_layers
    sides = []
    if rng.random() < TWO_GROUPS_SHARE:
        if num_layers > 1 and rng.random() < 0.7:
            for layer in _some(rng, num_layers - 1):
                kinds[layer] = LayerKind.SLIDING
        else:
            index = row("index.k", rng.choice((4, 8)), granule_tokens=rng.choice((1, 2)))
            window = rng.choice((None, None, 5))
            sides.append(SideCache("index", _some(rng, num_layers), (index,), sliding_window=window))
    elif rng.random() < WINDOW_SHARE:
        kinds = [LayerKind.SLIDING] * num_layers
    states = rng.choice(_STATES)
    if rng.random() < STATE_SHARE:
        if num_layers > 1 and rng.random() < 0.7:
            kinds[rng.randrange(num_layers)] = LayerKind.STATE
        else:
            sides.append(SideCache("state", _some(rng, num_layers), states=states))
    num_heads = 0 if rng.random() < LATENT_SHARE else rng.choice((1, 2, 3, 4))
    latent = ((row("latent", rng.choice((6, 12))),),)
    return ModelFacts(
        f"model-{rng.getrandbits(32):08x}",
        num_heads,
        tuple(kinds),
        key_and_value(num_heads, rng.choice((2, 4, 8))) if num_heads else latent,
        states,
        sliding_window=rng.randint(2, 7),
        side_caches=tuple(sides),
    )


def _some(rng: random.Random, most: int) -> tuple[int, ...]:
    """Return one or more of the first `most` layers, in order."""
    return tuple(sorted(rng.sample(range(most), rng.randint(1, most))))


def draw_deployment(rng: random.Random, model: ModelFacts, name: str) -> Deployment:
    """Return a deployment of a model as the engine `name`, of 1 to 12 ranks."""
    num_blocks, is_sharded = rng.randint(12, 24), rng.random() < SHARDED_SHARE
    is_vectorised = any(c.head_bytes == CHUNK_BYTES for array in model.token_arrays for c in array)
    layout = rng.choice([*LAYOUT_NAMES, *[VECTORISED] * is_vectorised])
    has_pages = layout in ("HND", "NHD") or AXIS_ORDERS.get(layout, "").startswith("lb")
    may_overlay = has_pages and LayerKind.SLIDING not in model.kinds
    is_overlaid = may_overlay and LayerKind.STATE in model.kinds and rng.random() < 0.8
    per_id = 1 if is_overlaid else rng.choice((1, 1, 1, 2))
    built = deploy(
        model,
        engine_id=name,
        generation="g1",
        tp=rng.choice((1, 2) if is_sharded else (1, 1, 2, 2, 3, 4)),
        pp=rng.choice((1, rng.randint(1, model.num_layers))),
        cp=2 if is_sharded else 1,
        interleave=2 if is_sharded else 1,
        block_tokens=rng.choice((2, 4, 8)[: 4 - per_id]),
        num_blocks=num_blocks * per_id,
        layout=layout + rng.choice(("", "+SD")),
        page_bytes=rng.choice((0, 0, 0, 96)),
        shared_pages=is_overlaid,
    )
    arrangement = _Arrangement(rng, built, name, num_blocks, per_id)
    ranks = {rank: arrangement.shape(spec, layout) for rank, (spec, layout) in built.items()}
    groups = {
        group.name: group for rank in sorted(ranks, reverse=True) for group in ranks[rank].layout.groups
    }
    return Deployment(num_blocks, ranks, groups)


class _Arrangement:
    """What a deployment changes of the presets' layouts, on every rank alike: names, ids, and the regions."""

    def __init__(self, rng: random.Random, built: Ranks, name: str, num_blocks: int, per_id: int) -> None:
        """`per_id`: kernel blocks of a block id of attention, beside those that the presets make."""
        self._name, self._num_blocks, self._per_id = name, num_blocks, per_id
        self._regions = [RegionId(f"r{number}") for number in range(rng.choice((1, 1, 2, 3, 6)))]
        held = sorted({(t.layer, t.component) for _, layout in built.values() for t in layout.tensors})
        self._region_of = {key: rng.choice(self._regions) for key in held}
        self._has_all_groups, self._is_one_memory = rng.random() < 0.5, rng.random() < 0.5

    def shape(self, spec: EngineSpec, layout: RankLayout) -> RankShape:
        """Return one rank. A tensor keeps its offset in whatever region it goes to."""
        (size_bytes,) = (region.size_bytes for region in layout.regions)
        tensors = tuple(
            replace(t, group=self._rename(t.group), region=self._region_of[t.layer, t.component])
            for t in layout.tensors
        )
        used = {tensor.group for tensor in tensors}
        groups = [self._group(group) for group in layout.groups]
        held = replace(
            layout,
            groups=tuple(group for group in groups if self._has_all_groups or group.name in used),
            tensors=tensors,
            regions=tuple(RegionSpec(region, size_bytes) for region in self._regions),
        )
        if not self._is_one_memory:
            places = {region: (number, 0) for number, region in enumerate(self._regions)}
            return RankShape(spec, held, (size_bytes,) * len(self._regions), places)
        step = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        places = {region: (0, number * step) for number, region in enumerate(self._regions)}
        return RankShape(spec, held, (step * len(self._regions),), places)

    def _group(self, group: Group) -> Group:
        per_id = self._per_id if group.kind is GroupKind.ATTENTION else 1
        return replace(
            group,
            name=self._rename(group.name),
            num_blocks=self._num_blocks,
            block_tokens=group.block_tokens * per_id,
            physical_blocks_per_logical=group.physical_blocks_per_logical * per_id,
        )

    def _rename(self, group: GroupName) -> GroupName:
        return GroupName(f"{group}@{self._name}")


def block_tokens(shape: RankShape) -> int:
    """Return the tokens of a kernel block: of one size in all caches of tokens that a rank has, or 0."""
    used = {tensor.group for tensor in shape.layout.tensors}
    groups = [group for group in shape.layout.groups if group.name in used]
    return max((group.block_tokens // group.physical_blocks_per_logical for group in groups), default=0)


def span_of(group: Group) -> int:
    """Return the tokens that one block id stands for, on all ranks that share tokens; 0 in a state group."""
    return group.block_tokens * group.token_shard.count


def draw_request(
    rng: random.Random, deployment: Deployment, num_tokens: int, free: list[int], *, is_pull: bool = False
) -> Lists | None:
    """Return the blocks of a request in every group, taken out of `free`; None where that has too few.

    A publish has all tokens, of a sliding window perhaps the last blocks alone. A pull may have a prefix
    already. All ranks have the same ids; `own_lists` leaves out groups that a rank lacks.
    """
    num_held = 0
    if is_pull and rng.random() < PREFIX_HIT_SHARE:
        num_held = min(num_tokens, rng.randrange(num_tokens * 3 // 2 + 1))
    begins, counts = dict[str, int](), dict[str, int]()
    for name, group in deployment.groups.items():
        begins[name], counts[name] = 0, 1
        if group.kind is GroupKind.ATTENTION:
            begin, span = num_held, span_of(group)
            if group.sliding_window is not None and rng.random() < 0.7:
                begin = max(begin, num_tokens - group.sliding_window)
            begins[name] = begin // span * span
            counts[name] = -(-(num_tokens - begins[name]) // span)
    total = sum(counts.values())
    if total > len(free):
        return None
    taken = sorted(free)
    if rng.random() < 0.5:
        at = rng.randrange(len(free) - total + 1)
        taken = taken[at : at + total]
    else:
        taken = rng.sample(free, total)
    free[:] = [block for block in free if block not in taken]
    lists = {}
    for name, group in deployment.groups.items():
        ids = [taken.pop(0) for _ in range(counts[name])]
        state_at = num_tokens if group.kind is GroupKind.STATE else -1
        lists[name] = BlockList(ids=ids, first_token=begins[name], state_at=state_at)
    return lists


def own_lists(layout: RankLayout, lists: Mapping[str, BlockList]) -> Lists:
    """Return the lists of the groups that a rank has: those that it gives to `pull`."""
    return {group.name: lists[group.name] for group in layout.groups}


def first_piece(layout: RankLayout, lists: Mapping[str, BlockList]) -> int:
    """Return up to which token a source must have written for a pull to read something; 0: all comes last.

    States and sliding windows are read last. Pieces end where the rank's blocks and its turns of tokens do.
    """
    steps, begins = [], []
    for tensor in layout.tensors:
        group = next(group for group in layout.groups if group.name == tensor.group)
        if group.kind is GroupKind.ATTENTION and group.sliding_window is None:
            turn = group.token_shard.count * group.token_shard.interleave
            steps += [tensor.granule_tokens, span_of(group), turn]
            begins.append(lists[group.name].first_token)
    step = math.lcm(*steps)
    return (min(begins) // step + 1) * step if begins else 0


def split_publish(
    rng: random.Random, deployment: Deployment, lists: Mapping[str, BlockList], steps: Sequence[int]
) -> list[Lists]:
    """Return what a publish that grows lists with each of `steps`, which are ascending numbers of tokens.

    The first part goes with `publish`, each later one with `add_blocks` or `ready`. The last step is all of
    the request; it has the blocks of sliding windows.
    """
    parts: list[Lists] = [{} for _ in steps]
    for name, listed in lists.items():
        group, ids, done = deployment.groups[name], list(listed.ids), 0
        if group.kind is GroupKind.STATE:
            continue
        if group.sliding_window is not None:
            parts[-1][name] = listed
            continue
        span = span_of(group)
        for part, tokens in zip(parts, steps, strict=True):
            end = -(-tokens // span)
            if end > done:
                part[name] = BlockList(ids=ids[done:end], first_token=rng.choice((0, done * span)))
                done = end
    # A state, which stands at the end, is listed once, or again as long as something else is to come.
    adding = [part for part in parts if part] or parts[-1:]
    for name, listed in lists.items():
        if deployment.groups[name].kind is GroupKind.STATE:
            adding[-1][name] = rng.choice(parts[: parts.index(adding[-1]) + 1])[name] = listed
    return parts
