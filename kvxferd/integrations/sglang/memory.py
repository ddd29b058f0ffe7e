"""Host memory that is made to be shared: SGLang's caches and metadata in sealed memory from the first on.

GPU memory is left as it is: a mover in SGLang's own process reads it (`resident`), unless it can be exported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvxferd.memory import SealedMemory

_PAGE_BYTES = 4096


def in_sealed_memory(tensors: Sequence[Any], *, are_zero: bool) -> list[Any]:
    """Return the same tensors of the host in one sealed memory, which the daemon's movers can map.

    `are_zero`: nothing is to be copied. Strides become those of contiguous tensors.
    """
    places, end = [], 0
    for tensor in tensors:
        places.append(end)
        end += -(-tensor.nbytes // _PAGE_BYTES) * _PAGE_BYTES
    flat = SealedMemory.create(end, "kvxferd-sglang").torch()
    made = []
    for tensor, start in zip(tensors, places, strict=True):
        new = flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if not are_zero:
            new.copy_(tensor)
        made.append(new)
    return made


def rows_of(buffers: Any) -> dict[str, Any]:
    """Return the tensors of SGLang's `MetadataBuffers` by their names; each has a row for each request."""
    return {name: value for name, value in vars(buffers).items() if hasattr(value, "data_ptr")}
