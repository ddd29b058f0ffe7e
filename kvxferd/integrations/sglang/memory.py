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


def share_keys_and_values(pool: Any) -> None:
    """Put an `MHATokenToKVPool`'s buffers, which were just made, into sealed memory."""
    tensors = [*pool.k_buffer, *pool.v_buffer]
    if tensors and tensors[0].device.type == "cpu":
        made = in_sealed_memory(tensors, are_zero=True)
        pool.k_buffer, pool.v_buffer = made[: len(pool.k_buffer)], made[len(pool.k_buffer) :]


def share_latents(pool: Any) -> None:
    """Put an `MLATokenToKVPool`'s buffers, which were just made, into sealed memory."""
    if pool.kv_buffer and pool.kv_buffer[0].device.type == "cpu":
        pool.kv_buffer = in_sealed_memory(pool.kv_buffer, are_zero=True)


def share_rows(buffers: Any) -> None:
    """Put the tensors of SGLang's `MetadataBuffers` into sealed memory."""
    rows = rows_of(buffers)
    made = in_sealed_memory(list(rows.values()), are_zero=False)
    for name, tensor in zip(rows, made, strict=True):
        setattr(buffers, name, tensor)


def rows_of(buffers: Any) -> dict[str, Any]:
    """Return the tensors of SGLang's `MetadataBuffers` by their names; each has a row for each request."""
    return {name: value for name, value in vars(buffers).items() if hasattr(value, "data_ptr")}
