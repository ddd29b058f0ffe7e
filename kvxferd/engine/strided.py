"""Memory of which an engine has the address alone, in the form of a tensor."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvxferd.errors import LayoutError

_NAME = re.compile(r"[a-z]+(\d+)\w*")


@dataclass(frozen=True)
class StridedMemory:
    """A tensor by its address. `kvxferd.layout.from_tensors` and `kvxferd.memory.share` take it as one.

    It does not keep the memory allocated: the engine does, until `Suspended`, or until the rank is closed and
    its `memory_in_use` is False.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: str
    itemsize: int
    device: str

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        return self.address

    def stride(self) -> tuple[int, ...]:
        """Return the step of each dimension, in elements."""
        return self.strides

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return self.itemsize


def strided(
    address: int,
    shape: Sequence[int],
    dtype: object,
    device: str = "cpu",
    strides: Sequence[int] | None = None,
) -> StridedMemory:
    """Return the memory that begins at `address` as a tensor.

    Args:
        address: of the first element.
        shape: the sizes, in elements.
        dtype: torch's or numpy's type of element, or its name: "bfloat16", "float8_e4m3fn".
        device: where the memory is: "cpu", or "cuda" for any GPU.
        strides: the step of each dimension, in elements. None: no gaps, the last dimension innermost.

    Raises LayoutError for a type that is not of whole bytes, and for more or fewer strides than sizes.
    """
    name = str(dtype).removeprefix("torch.")
    found = _NAME.fullmatch(name)
    if found is None or int(found[1]) % 8:
        raise LayoutError(
            f"cannot describe memory of type {name!r}: give a type of whole bytes, as 'bfloat16'"
        )
    itemsize = int(getattr(dtype, "itemsize", int(found[1]) // 8))
    sizes = tuple(map(int, shape))
    packed = tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
    steps = packed if strides is None else tuple(map(int, strides))
    if len(steps) != len(sizes):
        raise LayoutError(f"cannot describe memory: {len(sizes)} dimensions have {len(steps)} strides")
    return StridedMemory(int(address), sizes, steps, name, itemsize, device)
