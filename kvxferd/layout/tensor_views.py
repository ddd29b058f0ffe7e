"""What a layout needs of an engine's tensors: sizes, byte strides, and the allocations under them.

A tensor is any object with torch's `data_ptr`, `shape`, `stride`, `element_size` and `dtype`: torch is not
imported here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvxferd.errors import LayoutError
from kvxferd.ids import RegionId


class TensorLike(Protocol):
    """What is called of a tensor. `untyped_storage` and `device` are read where it has them."""

    @property
    def shape(self) -> Sequence[int]:
        """Its sizes, in elements."""

    @property
    def dtype(self) -> Any:
        """Its type of element, whose text is ``torch.bfloat16`` or ``bfloat16``."""

    def data_ptr(self) -> int:
        """Return the address of its first element."""

    def stride(self) -> Sequence[int]:
        """Return the step of each dimension, in elements."""

    def element_size(self) -> int:
        """Return the bytes of an element."""


@dataclasses.dataclass(frozen=True)
class TensorView:
    """One tensor in its region. Strides and offset are bytes."""

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


@dataclasses.dataclass(frozen=True)
class TensorRegion:
    """The allocation under one tensor, or under several that share it: one region of a layout.

    It begins at its first byte, wherever that lies in a page: a layout does not depend on addresses.
    """

    region: RegionId
    address: int
    size_bytes: int
    device: str  # torch's type of device: "cpu", "cuda"
    owners: tuple[object, ...] = dataclasses.field(compare=False, repr=False)  # they keep it allocated

    @property
    def end(self) -> int:
        """The address after the region's last byte."""
        return self.address + self.size_bytes


def tensor_view(tensor: TensorLike, region: RegionId, region_address: int) -> TensorView:
    """Return a tensor's view in the region that begins at this address."""
    itemsize = tensor.element_size()
    return TensorView(
        region=region,
        offset=tensor.data_ptr() - region_address,
        shape=tuple(int(size) for size in tensor.shape),
        strides=tuple(int(stride) * itemsize for stride in tensor.stride()),
        itemsize=itemsize,
    )


def device_type(tensor: TensorLike) -> str:
    """Return torch's name of the kind of device: "cpu" where a tensor does not tell."""
    device = getattr(tensor, "device", "cpu")
    return str(getattr(device, "type", device)).partition(":")[0]


def tensor_regions(tensors: Mapping[str, TensorLike]) -> tuple[TensorRegion, ...]:
    """Return the allocations under these tensors, each with the name of the first tensor in it.

    An allocation is a tensor's whole storage; storages that share bytes are one. Raises LayoutError for a
    tensor without memory.
    """
    named = [_region_of(name, tensor) for name, tensor in tensors.items()]
    order = {found.region: position for position, found in enumerate(named)}
    merged: list[TensorRegion] = []
    for found in sorted(named, key=lambda one: (one.device, one.address)):
        last = merged[-1] if merged else None
        if last is None or last.device != found.device or found.address >= last.end:
            merged.append(found)
            continue
        merged[-1] = dataclasses.replace(
            last,
            region=min(last.region, found.region, key=order.__getitem__),
            size_bytes=max(last.end, found.end) - last.address,
            owners=(*last.owners, *found.owners),
        )
    merged.sort(key=lambda one: order[one.region])
    return tuple(merged)


def _region_of(name: str, tensor: TensorLike) -> TensorRegion:
    """Return a tensor's storage, to the byte; without one, the bytes from its first to its last element."""
    device = device_type(tensor)
    try:
        if hasattr(tensor, "untyped_storage"):
            owner = tensor.untyped_storage()
            address, size_bytes = int(owner.data_ptr()), int(owner.nbytes())
        else:
            owner, itemsize = tensor, tensor.element_size()
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            address = int(tensor.data_ptr())
            size_bytes = itemsize * (1 + sum((size - 1) * max(step, 0) for size, step in steps))
    except Exception as error:  # a sparse, fake or nested tensor has no one storage: each its own exception
        raise LayoutError(f"cannot describe tensor {name!r}: it has no plain storage ({error})") from error
    if address <= 0 or size_bytes <= 0:
        raise LayoutError(
            f"cannot describe tensor {name!r}: it has no memory ({size_bytes} bytes on device {device!r}); "
            "give the tensor that the engine computes in"
        )
    return TensorRegion(RegionId(name), address, size_bytes, device, (owner,))
