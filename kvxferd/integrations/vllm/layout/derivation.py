"""Derive a rank's layout from the tensors that vLLM registers. An unknown cache is refused, not guessed.

What a block of it holds need not be known: then it moves as an opaque page.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from kvxferd.ids import RegionId
from kvxferd.integrations.vllm.layout.attention import (
    attention_tensors,
    check_shape,
    is_described,
    kernel_block_tokens,
    ring_tensor,
)
from kvxferd.integrations.vllm.layout.facts import (
    AttentionFacts,
    CacheGroup,
    CacheKind,
    LayerFacts,
    LayerKey,
    WorkerFacts,
    is_draft,
    layer_error,
    layer_key_of,
    unit_range_of_rank,
)
from kvxferd.integrations.vllm.layout.groups import CacheGroups
from kvxferd.integrations.vllm.layout.opaque import is_opaque, opaque_page
from kvxferd.integrations.vllm.layout.states import state_tensors
from kvxferd.integrations.vllm.layout.support import SUPPORT_PAGE, refusal_of_backend
from kvxferd.layout import (
    CacheTensor,
    Group,
    GroupKind,
    RankLayout,
    RegionSpec,
    TensorRegion,
    TokenShard,
    UnitRange,
)
from kvxferd.layout.tensor_views import TensorView, tensor_view

if TYPE_CHECKING:
    import torch

    Tensors = torch.Tensor | Sequence[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class DerivedCaches:
    """A rank's layout, and the allocations behind its regions."""

    layout: RankLayout
    storages: tuple[TensorRegion, ...]
    opaque_layers: Mapping[str, int] = dataclasses.field(default_factory=dict)  # number, by backend or mixer


def derive_layout(
    kv_caches: Mapping[str, Tensors],
    layers: Sequence[LayerFacts],
    groups: CacheGroups,
    worker: WorkerFacts,
) -> DerivedCaches:
    """Return a rank's layout with its allocations. Raises LayoutError, naming the layer it cannot describe.

    `kv_caches` is the argument of vLLM's `register_kv_caches`. A layer that uses another layer's tensor
    has no facts of its own: the tensor is described once, for its owner.
    """
    return _Derivation(kv_caches, layers, groups, worker).result()


class _Derivation:
    """Derives one rank's layout, layer by layer."""

    def __init__(
        self,
        kv_caches: Mapping[str, Tensors],
        layers: Sequence[LayerFacts],
        groups: CacheGroups,
        worker: WorkerFacts,
    ) -> None:
        self._worker = worker
        self._groups = dict(zip((g.index for g in groups.groups), groups.groups, strict=True))
        self._names = dict(zip((g.index for g in groups.groups), groups.names, strict=True))
        self._storages: dict[int, TensorRegion] = {}
        self._per_id: dict[int, int] = {}  # kernel blocks in an id, by group
        self._tensors: list[CacheTensor] = []
        self._layer_of: dict[tuple[int, str], str] = {}  # vLLM's name, by layer and component
        self._opaque_layers: collections.Counter[str] = collections.Counter()
        described = {layer.name for layer in layers}
        # The shortest name is of the layer's own cache, and the others are of those beside it.
        for layer in sorted(layers, key=lambda layer: (len(layer.name), layer.name)):
            if layer.name not in kv_caches:
                raise layer_error(layer.name, "vLLM registered no tensor for it")
            self._add_layer(layer, _as_tuple(kv_caches[layer.name]))
        owned = {_identity(t) for name in described for t in _as_tuple(kv_caches[name])}
        for name in kv_caches.keys() - described:
            if any(_identity(tensor) not in owned for tensor in _as_tuple(kv_caches[name])):
                raise layer_error(name, "no cache group has it, and its tensor is no other layer's")

    def result(self) -> DerivedCaches:
        """Return what was derived."""
        stage = self._worker.stage
        layout = RankLayout(
            start_layer=stage.start,
            end_layer=stage.stop,
            groups=tuple(self._layout_group(index) for index in self._groups),
            tensors=tuple(sorted(self._tensors, key=lambda t: (t.layer, t.component))),
            regions=tuple(RegionSpec(s.region, s.size_bytes) for s in self._storages.values()),
        )
        return DerivedCaches(layout, tuple(self._storages.values()), self._opaque_layers)

    def _add_layer(self, layer: LayerFacts, tensors: tuple[torch.Tensor, ...]) -> None:
        """Describe one layer's cache."""
        group, name = self._groups[layer.group], self._names[layer.group]
        key = layer_key_of(layer.name, self._worker)
        views = tuple(self._view_of(tensor) for tensor in tensors)
        if isinstance(layer.cache, AttentionFacts):
            if len(views) != 1:
                raise layer_error(layer.name, f"{len(views)} tensors of one cache of attention")
            found = self._attention_tensors(layer, layer.cache, key, views[0], group)
        else:
            if group.kind is not CacheKind.STATE:
                raise layer_error(layer.name, f"a state in a group of kind {group.kind}")
            for view in views:
                self._check_num_blocks(layer, view)
            found = state_tensors(layer, layer.cache, key, views, name, self._worker)
        if any(map(is_opaque, found)):
            self._opaque_layers[layer.backend or getattr(layer.cache, "mixer", "")] += 1
        self._tensors += (self._with_own_component(layer, tensor) for tensor in found)

    def _attention_tensors(
        self, layer: LayerFacts, cache: AttentionFacts, key: LayerKey, view: TensorView, group: CacheGroup
    ) -> list[CacheTensor]:
        """Describe a cache of attention, or a ring, by what its blocks hold or as opaque pages."""
        if (refusal := refusal_of_backend(layer.backend)) is not None:
            raise layer_error(layer.name, f"{refusal} (see {SUPPORT_PAGE})")
        check_shape(layer, cache, view)
        name = self._names[group.index]
        if group.kind is CacheKind.STATE:
            self._check_num_blocks(layer, view)
            ring = ring_tensor(layer, cache, key, view, name)
            return [ring or opaque_page(layer, cache, key, view, group, name, self._worker)]
        self._check_blocks(layer, cache, group, view)
        if not is_described(layer, cache):
            return [opaque_page(layer, cache, key, view, group, name, self._worker)]
        heads = self._held_heads(layer, cache, key.layer)
        return attention_tensors(layer, cache, key, view, name, heads)

    def _with_own_component(self, layer: LayerFacts, tensor: CacheTensor) -> CacheTensor:
        """Return a tensor whose component no other cache of its layer has.

        The second of a kind has the rest of its name: ``compressor.indexer.compressor.state_cache``.
        """
        own = self._layer_of.setdefault((tensor.layer, tensor.component), layer.name)
        if own == layer.name:
            return tensor
        parts = layer.name.split(".")
        shared = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(parts, own.split("."), strict=False)
        )
        rest = ".".join(parts[len(list(shared)) :])
        return msgspec.structs.replace(tensor, component=f"{tensor.component}.{rest}")

    def _view_of(self, tensor: torch.Tensor) -> TensorView:
        """Return a tensor's view, and add its storage to the regions."""
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start not in self._storages:
            region = RegionId(f"kv.{len(self._storages)}")
            self._storages[start] = TensorRegion(
                region, start, storage.nbytes(), tensor.device.type, (storage,)
            )
        found = self._storages[start]
        return tensor_view(tensor, found.region, found.address)

    def _check_num_blocks(self, layer: LayerFacts, view: TensorView) -> None:
        """Check that a tensor of states has a block for each id."""
        if view.shape[0] != self._worker.num_blocks:
            raise layer_error(
                layer.name, f"its tensor has {view.shape[0]} blocks, its group {self._worker.num_blocks}"
            )

    def _check_blocks(
        self, layer: LayerFacts, cache: AttentionFacts, group: CacheGroup, view: TensorView
    ) -> None:
        """Check that an id has a whole number of kernel blocks, the same in all layers of the group."""
        tokens = kernel_block_tokens(cache, view)
        ratio, rest = divmod(view.shape[0], max(1, self._worker.num_blocks))
        if rest or ratio < 1 or tokens * ratio != group.block_tokens:
            raise layer_error(
                layer.name,
                f"its tensor has {view.shape[0]} blocks of {tokens} tokens, "
                f"its group {self._worker.num_blocks} of {group.block_tokens}",
            )
        if group.shard_count > 1 and self._worker.interleave % cache.tokens_per_state:
            raise layer_error(
                layer.name,
                f"cp_kv_cache_interleave_size is {self._worker.interleave}, and a state stands for "
                f"{cache.tokens_per_state} tokens, which would lie on several ranks",
            )
        if self._per_id.setdefault(group.index, ratio) != ratio:
            raise layer_error(
                layer.name,
                f"its blocks are split into {ratio}, those of other layers of its group into "
                f"{self._per_id[group.index]}",
            )

    def _held_heads(self, layer: LayerFacts, cache: AttentionFacts, number: int) -> UnitRange:
        """Return which of the layer's KV heads this rank holds."""
        worker = self._worker
        total = worker.num_draft_kv_heads if is_draft(number, worker) else worker.num_kv_heads
        if cache.head_size_v == 0:
            return UnitRange(0, 1)
        if total // worker.tp_size != cache.num_heads and cache.num_heads > 1:
            # This layer has a number of heads of its own. More than one is left, so they were divided.
            total = cache.num_heads * worker.tp_size
        try:
            return unit_range_of_rank(cache.num_heads, total, worker.tp_size, worker.tp_rank)
        except ValueError as error:
            raise layer_error(layer.name, f"its KV heads: {error}") from error

    def _layout_group(self, index: int) -> Group:
        """Return a group of the layout. Every stage has every group, because block lists are the engine's."""
        group = self._groups[index]
        if group.kind is CacheKind.STATE:
            return Group(self._names[index], self._worker.num_blocks, kind=GroupKind.STATE)
        shard = TokenShard()
        if group.shard_count > 1:
            shard = TokenShard(group.shard_count, self._worker.dcp_rank, self._worker.interleave)
        return Group(
            self._names[index],
            self._worker.num_blocks,
            group.block_tokens,
            sliding_window=group.kept_tokens,
            token_shard=shard,
            physical_blocks_per_logical=self._per_id.get(index, 1),
        )


def _as_tuple(tensors: Tensors) -> tuple[torch.Tensor, ...]:
    import torch

    return (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)


def _identity(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return a key that is equal for two views of the same cache."""
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())
