"""Build the layout of a rank from a model's facts and a deployment's options."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from kvxferd.ids import EngineId, Generation, GroupName, Rank, RegionId
from kvxferd.layout.conv_split import compute_physical_blocks_per_logical
from kvxferd.layout.engine import EngineSpec
from kvxferd.layout.presets.deployment_options import AXIS_ORDERS, DeploymentOptions, ShardPosition
from kvxferd.layout.presets.model_facts import (
    LayerKind,
    ModelFacts,
    SideCache,
    StateComponent,
    TokenComponent,
)
from kvxferd.layout.presets.states import state_bytes, state_tensors
from kvxferd.layout.presets.token_arrays import TokenArray, held_units
from kvxferd.layout.tensors import (
    CacheTensor,
    Group,
    GroupKind,
    RankLayout,
    RegionSpec,
    TokenShard,
    num_units,
)

_KV_REGION = RegionId("kv")


def model_spec(
    model: ModelFacts, choices: DeploymentOptions, rank: Rank, engine_id: str, generation: str = "preset"
) -> EngineSpec:
    """Return one rank's spec."""
    return EngineSpec(
        EngineId(engine_id),
        Generation(generation),
        model.num_layers,
        pp_size=choices.pp,
        tp_size=choices.ranks_per_stage,
        pp_rank=rank.pp_rank,
        tp_rank=rank.tp_rank,
        num_kv_heads=model.num_kv_heads,
        fingerprint=model.name,
    )


def model_layout(model: ModelFacts, choices: DeploymentOptions, rank: Rank) -> RankLayout:
    """Return the layout of one rank.

    The rank's cache is one region of the exact size. Groups are "full", "sliding", for states "state.0"
    and so on, and others of side caches. A block has whole granules: more tokens than `block_tokens` where
    it is no multiple. With `shared_pages`, a hybrid's attention and states are in common pages, as in vLLM:
    a page holds either a logical block of attention or one state, and a logical block has as many kernel
    blocks as a state needs room; not where a model has side caches. Every stage has every group, because
    block lists are the engine's.
    """
    stage = choices.stage(model.num_layers, rank.pp_rank)
    builder = _LayoutBuilder(model, choices, choices.share(rank))
    if LayerKind.STATE in model.kinds and choices.shared_pages and not model.side_caches:
        builder.add_shared_pages(stage)
    else:
        builder.add_separate_regions(stage)
    regions = (RegionSpec(_KV_REGION, builder.used),) if builder.used else ()
    return RankLayout(stage.start, stage.stop, tuple(builder.groups), tuple(builder.tensors), regions)


class _LayoutBuilder:
    """Builds one rank's layout."""

    def __init__(
        self,
        model: ModelFacts,
        choices: DeploymentOptions,
        share: ShardPosition,
    ) -> None:
        self.groups: list[Group] = []
        self.tensors: list[CacheTensor] = []
        self.used = 0  # bytes of the region
        self._model = model
        self._choices = choices
        self._share = share

    def add_separate_regions(self, stage: range) -> None:
        """Add every group in arrays of its own, one after the other."""
        by_group: dict[str, list[SideCache]] = {}
        for cache in self._model.caches:
            by_group.setdefault(cache.group, []).append(cache)
        for name, caches in by_group.items():
            first = caches[0]
            if first.states:
                group = self._state_group(name)
            else:
                arrays = tuple(cache.components for cache in caches)
                group = self._token_group(name, arrays, first.sliding_window, first.block_tokens)
            for cache in caches:
                self._add_cache(group, cache, [layer for layer in cache.layers if layer in stage])

    def _add_cache(self, group: Group, cache: SideCache, layers: list[int]) -> None:
        """Add a cache of some layers: states in one array a layer, or one array of all."""
        if cache.states:
            self._add_states(group, layers, cache.states)
        elif layers:
            array = TokenArray(cache.components, self._choices, self._share, group, len(layers))
            self._add_token_array(array, layers, self.used)
            self.used += array.total_bytes

    def _add_states(self, group: Group, layers: list[int], states: tuple[StateComponent, ...]) -> None:
        page_bytes = max(state_bytes(states, self._share), self._choices.page_bytes)
        for layer in layers:
            self._add_state(group, layer, self.used, page_bytes, states)
            self.used += group.num_blocks * page_bytes

    def add_shared_pages(self, stage: range) -> None:
        """Add attention and states in common pages: slots of pages, with at most one layer of each group."""
        if LayerKind.SLIDING in self._model.kinds:
            raise ValueError(
                f"cannot build {self._model.name!r}: no preset has states beside a sliding window"
            )
        attention, *state_groups = _layer_groups(self._model)
        own = [[layer for layer in group if layer in stage] for group in (attention, *state_groups)]
        slots = max(map(len, own))
        page_bytes = max(state_bytes(self._model.states, self._share), self._choices.page_bytes)
        num_pages = self._choices.blocks_of("full" if attention else "state.0")
        if attention:
            per_logical = blocks_per_logical(
                self._model, self._choices.tp, self._choices.block_tokens, self._choices.page_bytes
            )
            group = self._token_group("full", self._model.token_arrays, per_logical=per_logical)
            (components,) = self._model.token_arrays
            array = TokenArray(components, _with_kv_in_one_page(self._choices), self._share, group, slots)
            page_bytes = array.block_bytes * per_logical
            self._add_token_array(array, own[0], self.used)
        for number, layers in enumerate(own[1:]):
            group = self._state_group(f"state.{number}")
            if group.num_blocks != num_pages:
                raise ValueError(
                    f"cannot deploy with num_blocks {group.num_blocks} of {group.name!r} and {num_pages} of "
                    "the rest: they share their pages"
                )
            for slot, layer in enumerate(layers):
                start = self.used + slot * num_pages * page_bytes
                self._add_state(group, layer, start, page_bytes, self._model.states)
        self.used += slots * num_pages * page_bytes

    def _add_token_array(self, array: TokenArray, layers: Sequence[int], start: int) -> None:
        self.tensors.extend(array.tensors(layers, start, _KV_REGION))

    def _add_state(
        self, group: Group, layer: int, start: int, page_bytes: int, states: tuple[StateComponent, ...]
    ) -> None:
        self.tensors.extend(
            state_tensors(
                states,
                self._share,
                group,
                layer=layer,
                start=start,
                page_bytes=page_bytes,
                region=_KV_REGION,
                is_row_major=self._choices.is_row_major,
            )
        )

    def _token_group(
        self,
        name: str,
        arrays: tuple[tuple[TokenComponent, ...], ...],
        sliding_window: int | None = None,
        block_tokens: int = 0,
        per_logical: int = 1,
    ) -> Group:
        granules = (component.granule_tokens for components in arrays for component in components)
        self.groups.append(
            Group(
                GroupName(name),
                self._choices.blocks_of(name),
                math.lcm(block_tokens or self._choices.block_tokens, *granules) * per_logical,
                # The next token takes a place in the window itself.
                sliding_window=sliding_window and max(1, sliding_window - 1),
                token_shard=self._share.tokens,
                physical_blocks_per_logical=per_logical,
            )
        )
        return self.groups[-1]

    def _state_group(self, name: str) -> Group:
        self.groups.append(Group(GroupName(name), self._choices.blocks_of(name), kind=GroupKind.STATE))
        return self.groups[-1]


def _layer_groups(model: ModelFacts) -> list[list[int]]:
    """Return the model's attention layers, then its state layers in groups of at most as many."""
    attention = [layer for layer, kind in enumerate(model.kinds) if kind is LayerKind.FULL]
    states = [layer for layer, kind in enumerate(model.kinds) if kind is LayerKind.STATE]
    size = len(attention) or len(states)
    return [attention, *(states[start : start + size] for start in range(0, len(states), size))]


def blocks_per_logical(model: ModelFacts, tp_size: int, block_tokens: int, page_bytes: int = 0) -> int:
    """Return how many kernel blocks of attention a hybrid's logical block needs to have room for a state.

    It is the most that any rank needs: a block id stands for the same tokens on every rank of an engine.
    """
    (array,) = model.token_arrays
    most = 1
    for tp_rank in range(tp_size):
        share = ShardPosition(tp_size, tp_rank, TokenShard())
        heads = num_units(held_units(array[0], share))
        block_bytes = len(array) * block_tokens * heads * array[0].head_bytes
        block_bytes = max(block_bytes, page_bytes)
        most = max(most, compute_physical_blocks_per_logical([state_bytes(model.states, share)], block_bytes))
    return most


def _with_kv_in_one_page(choices: DeploymentOptions) -> DeploymentOptions:
    """Return the options with K and V of a block in one page, as shared pages require."""
    arrangement = choices.arrangement
    if arrangement in ("HND", "NHD"):
        return dataclasses.replace(choices, layout=f"{arrangement}-blocks-first")
    if not AXIS_ORDERS.get(arrangement, "").startswith("lb"):
        raise ValueError(
            f"cannot build a hybrid's shared pages as {choices.layout!r}: K and V of a layer share one"
        )
    return choices
