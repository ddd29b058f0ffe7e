"""Copies between vLLM's tensors and shared buffers, for memory that the daemon cannot map in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvxferd.client import BlockList
from kvxferd.ids import GroupName, RegionId
from kvxferd.integrations.vllm.layout.derivation import DerivedCaches
from kvxferd.layout import TensorRegion
from kvxferd.memory import SealedMemory

if TYPE_CHECKING:
    import torch


class _Pair(NamedTuple):
    """One of vLLM's tensors, as bytes, and its copy in a shared buffer."""

    tensor: torch.Tensor
    buffer: torch.Tensor
    per_id: int  # kernel blocks of an id


class BounceBuffers:
    """The part of a rank's cache that is copied: whole blocks, of every layer of a group."""

    def __init__(self, derived: DerivedCaches, buffers: Mapping[RegionId, SealedMemory]) -> None:
        """Pair each tensor with its buffer. `buffers` has one of the region's size for each copied region."""
        tensors = {region: memory.torch() for region, memory in buffers.items()}
        by_address = {s.address: s for s in derived.storages if s.region in buffers}
        self._pairs: dict[GroupName, list[_Pair]] = {}
        for group in derived.layout.groups:
            seen: set[tuple[int, tuple[int, ...]]] = set()
            pairs = self._pairs.setdefault(group.name, [])
            for tensor in derived.tensors[group.name]:
                storage = by_address.get(tensor.untyped_storage().data_ptr())
                key = (tensor.data_ptr(), tuple(tensor.shape))
                if storage is not None and key not in seen:
                    seen.add(key)
                    pairs.append(_pair(tensor, storage, tensors[storage.region], group.num_blocks))

    def copy_out(self, blocks: Mapping[str, BlockList]) -> None:
        """Copy blocks from vLLM's tensors, before they are read. The caller has waited for their writers."""
        for pair, indexes in self._selected(blocks):
            pair.buffer.index_copy_(0, indexes, pair.tensor.index_select(0, indexes))

    def copy_in(self, blocks: Mapping[str, BlockList]) -> None:
        """Copy blocks to vLLM's tensors, after they have arrived. No other code may write them meanwhile."""
        for pair, indexes in self._selected(blocks):
            pair.tensor.index_copy_(0, indexes, pair.buffer.index_select(0, indexes))

    def _selected(self, blocks: Mapping[str, BlockList]) -> Sequence[tuple[_Pair, torch.Tensor]]:
        """Return every pair with the kernel blocks that the lists name."""
        import torch

        selected = []
        for name, listed in blocks.items():
            ids = np.array(listed.ids, dtype=np.int64)
            for pair in self._pairs[GroupName(name)] if len(ids) else ():
                kernel_blocks = (ids[:, None] * pair.per_id + np.arange(pair.per_id)).ravel()
                selected.append((pair, torch.from_numpy(kernel_blocks)))
        return selected


def _pair(tensor: torch.Tensor, storage: TensorRegion, buffer: torch.Tensor, num_blocks: int) -> _Pair:
    """Return a tensor with its copy: the same bytes at the same offset of the buffer."""
    import torch

    own = tensor.detach().view(torch.uint8)  # some dtypes cannot be indexed
    start = own.data_ptr() - storage.address
    copy = torch.as_strided(buffer, tuple(own.shape), tuple(own.stride()), start)
    return _Pair(own, copy, own.shape[0] // num_blocks)
