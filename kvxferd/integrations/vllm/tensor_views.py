"""What a layout needs of a torch tensor: sizes, byte strides, and its offset in its region."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kvxferd.ids import RegionId

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class TensorView:
    """One of vLLM's cache tensors. Strides and offset are bytes."""

    region: RegionId
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def content_bytes(self) -> int:
        """Return the bytes along the last axis, if `is_last_axis_contiguous`."""
        return self.shape[-1] * self.itemsize

    @property
    def is_last_axis_contiguous(self) -> bool:
        """Whether the elements along the last axis are contiguous."""
        return self.shape[-1] == 1 or self.strides[-1] == self.itemsize


def tensor_view(tensor: torch.Tensor, region: RegionId, region_address: int) -> TensorView:
    """Return a tensor's view in the region that begins at this address."""
    itemsize = tensor.element_size()
    return TensorView(
        region=region,
        offset=tensor.data_ptr() - region_address,
        shape=tuple(tensor.shape),
        strides=tuple(stride * itemsize for stride in tensor.stride()),
        itemsize=itemsize,
    )
