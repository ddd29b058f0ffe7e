"""Free memory of this process's heap, which allocations take before glibc maps them by themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

# More than glibc's largest threshold, 32 MiB: what no free range holds has a mapping of its own.
LARGE_BYTES = 33 << 20


def take_free_heap() -> list[torch.Tensor]:
    """Return tensors that hold the heap's free ranges of `LARGE_BYTES` and more.

    While they are kept, a tensor of that size has a mapping of its own: a long run of tests may have left
    such a range free.
    """
    held: list[torch.Tensor] = []
    while True:
        tensor = torch.empty(LARGE_BYTES, dtype=torch.uint8)
        if not _is_in_heap(tensor.data_ptr()):
            return held
        held.append(tensor)


def _is_in_heap(address: int) -> bool:
    with open("/proc/self/maps") as lines:
        for line in lines:
            if line.rstrip().endswith("[heap]"):
                start, end = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
                if start <= address < end:
                    return True
    return False


@pytest.fixture(autouse=True)
def no_free_heap() -> Iterator[None]:
    """Give large tensors mappings of their own, as a new process does. For the conftest of a folder."""
    held = take_free_heap()
    yield
    del held
