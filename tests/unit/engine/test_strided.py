"""Memory by its address."""

from __future__ import annotations

import ctypes

import pytest

from kvxferd import engine as kv
from kvxferd.errors import LayoutError
from kvxferd.layout import from_tensors
from kvxferd.memory import SealedMemory, share

SPEC = kv.EngineSpec("e", "g", 1, num_kv_heads=2)
DIMS = "block token head head_dim"


@pytest.mark.parametrize(
    ("dtype", "itemsize"), [("bfloat16", 2), ("float8_e4m3fn", 1), ("uint8", 1), ("torch.float32", 4)]
)
def test_a_type_has_its_size(dtype: str, itemsize: int) -> None:
    found = kv.strided(4096, [3, 4], dtype)
    assert (found.element_size(), found.stride(), found.dtype) == (
        itemsize,
        (4, 1),
        dtype.removeprefix("torch."),
    )


def test_torchs_types_are_taken() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64):
        assert kv.strided(4096, [3], dtype).element_size() == dtype.itemsize


@pytest.mark.parametrize("dtype", ["bool", "int4", "<class 'numpy.float16'>", ""])
def test_a_type_without_whole_bytes_is_refused(dtype: str) -> None:
    with pytest.raises(LayoutError, match="whole bytes"):
        kv.strided(4096, [3, 4], dtype)


def test_each_dimension_has_a_stride() -> None:
    with pytest.raises(LayoutError, match="2 dimensions have 1 strides"):
        kv.strided(4096, [3, 4], "uint8", strides=[4])


def test_it_is_described_and_shared_as_a_tensor_is() -> None:
    with SealedMemory.create(1 << 16) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory.buffer))
        tensor = kv.strided(address, [4, 8, 2, 16], "bfloat16", strides=[512, 32, 16, 1])
        layout = from_tensors(SPEC, {"k": kv.NamedTensor(tensor=tensor, dims=DIMS, layers=0, components="k")})
        (cache,) = layout.tensors
        assert (cache.dtype, cache.block_stride, cache.token_stride, cache.offset) == (
            "bfloat16",
            1024,
            64,
            0,
        )
        shared = share(tensor)
        assert (shared.memory, shared.offset, shared.size_bytes) == (memory, 0, 3 * 1024 + 8 * 64)
