"""Derive a rank's layout from the tensors that vLLM registers. An unknown cache is refused, not guessed."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvxferd.ids import GroupName, RegionId
from kvxferd.integrations.vllm.layout.attention import (
    attention_tensors,
    check_shape,
    kernel_block_tokens,
    num_kernel_blocks,
)
from kvxferd.integrations.vllm.layout.facts import (
    AttentionFacts,
    CacheGroup,
    CacheKind,
    LayerFacts,
    WorkerFacts,
    is_draft,
    layer_error,
    layer_key_of,
    unit_range_of_rank,
)
from kvxferd.integrations.vllm.layout.groups import CacheGroups
from kvxferd.integrations.vllm.layout.shared_pages import SharedPages
from kvxferd.integrations.vllm.layout.states import state_tensors
from kvxferd.layout import (
    CacheTensor,
    Group,
    GroupKind,
    RankLayout,
    RegionSpec,
    TokenShard,
    UnitRange,
)
from kvxferd.layout.tensor_views import TensorView, tensor_view

if TYPE_CHECKING:
    import torch

    Tensors = torch.Tensor | Sequence[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class CacheStorage:
    """One of vLLM's allocations, which becomes a region.

    On the host the region is whole pages, from the page of the first byte on, because another process
    can map only whole pages.
    """

    region: RegionId
    address: int
    size_bytes: int
    device: str  # torch's type of device, "cpu" or "cuda"
    owner: torch.UntypedStorage  # keeps the allocation alive


@dataclasses.dataclass(frozen=True)
class DerivedCaches:
    """A rank's layout, the allocations behind its regions, and each group's tensors."""

    layout: RankLayout
    storages: tuple[CacheStorage, ...]
    tensors: Mapping[GroupName, tuple[torch.Tensor, ...]]

    @property
    def regions(self) -> dict[RegionId, tuple[int, int, torch.UntypedStorage]]:
        """Return the address, size in bytes and owner of each region."""
        return {s.region: (s.address, s.size_bytes, s.owner) for s in self.storages}


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
        self._storages: dict[int, CacheStorage] = {}
        self._per_id: dict[int, int] = {}  # kernel blocks in an id, by group
        self._shared_pages = SharedPages()
        self._tensors: list[CacheTensor] = []
        self._tensors_by_group: dict[GroupName, list[torch.Tensor]] = {name: [] for name in groups.names}
        described = {layer.name for layer in layers}
        for layer in layers:
            if layer.name not in kv_caches:
                raise layer_error(layer.name, "vLLM registered no tensor for it")
            self._add_layer(layer, _as_tuple(kv_caches[layer.name]))
        self._shared_pages.check()
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
        blocks = {name: tuple(tensors) for name, tensors in self._tensors_by_group.items()}
        return DerivedCaches(layout, tuple(self._storages.values()), blocks)

    def _add_layer(self, layer: LayerFacts, tensors: tuple[torch.Tensor, ...]) -> None:
        """Describe one layer's cache."""
        group, name = self._groups[layer.group], self._names[layer.group]
        key = layer_key_of(layer.name, self._worker)
        views = tuple(self._view_of(tensor) for tensor in tensors)
        if isinstance(layer.cache, AttentionFacts):
            if group.kind is CacheKind.STATE or len(views) != 1:
                raise layer_error(layer.name, f"{len(views)} tensors in a group of kind {group.kind}")
            check_shape(layer, layer.cache, views[0])
            self._check_blocks(layer, group, views[0])
            self._shared_pages.add_attention(views[0], self._per_id[group.index])
            heads = self._held_heads(layer, layer.cache, key.layer)
            self._tensors += attention_tensors(layer, layer.cache, key, views[0], name, heads)
        else:
            if group.kind is not CacheKind.STATE:
                raise layer_error(layer.name, f"a state in a group of kind {group.kind}")
            if any(view.shape[0] != self._worker.num_blocks for view in views):
                raise layer_error(
                    layer.name,
                    f"its tensor has {views[0].shape[0]} blocks, its group {self._worker.num_blocks}",
                )
            self._tensors += state_tensors(layer, layer.cache, key, views, name, self._worker)
            self._shared_pages.add_state(layer, layer.cache, views[0].region)
        self._tensors_by_group[name].extend(tensors)

    def _view_of(self, tensor: torch.Tensor) -> TensorView:
        """Return a tensor's view, and add its storage to the regions."""
        storage = tensor.untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        if start not in self._storages:
            region = RegionId(f"kv.{len(self._storages)}")
            page = mmap.PAGESIZE if tensor.device.type == "cpu" else 1
            address = start // page * page
            self._storages[start] = CacheStorage(
                region, address, -(-end // page) * page - address, tensor.device.type, storage
            )
        found = self._storages[start]
        return tensor_view(tensor, found.region, found.address)

    def _check_blocks(self, layer: LayerFacts, group: CacheGroup, view: TensorView) -> None:
        """Check that an id has a whole number of kernel blocks, the same in all layers of the group."""
        ratio, rest = divmod(num_kernel_blocks(view), max(1, self._worker.num_blocks))
        if rest or ratio < 1 or kernel_block_tokens(view) * ratio != group.block_tokens:
            raise layer_error(
                layer.name,
                f"its tensor has {num_kernel_blocks(view)} blocks of {kernel_block_tokens(view)} tokens, "
                f"its group {self._worker.num_blocks} of {group.block_tokens}",
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
