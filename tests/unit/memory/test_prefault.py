"""Pages at hand before they are touched, and none made that nobody had."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxferd.memory.mapping import Mapping, map_memfd
from kvxferd.memory.prefault import STEP_BYTES, prefault

PAGE = mmap.PAGESIZE
SIZE = 2 * STEP_BYTES + PAGE


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("kvxferd-populating")
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


@pytest.fixture
def mapping(fd: int) -> Iterator[Mapping]:
    mapping = map_memfd(fd, SIZE)
    yield mapping
    mapping.unmap()


def num_mapped(mapping: Mapping) -> int:
    """Pages of the mapping that this process has at hand, from its page table."""
    with open("/proc/self/pagemap", "rb") as table:
        table.seek(mapping.address // PAGE * 8)
        entries = memoryview(table.read(SIZE // PAGE * 8)).cast("Q")
    return sum(entry >> 63 for entry in entries)


def num_made(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512 // PAGE


def test_what_was_written_is_at_hand(fd: int, mapping: Mapping) -> None:
    os.pwrite(fd, bytes(SIZE), 0)
    assert num_mapped(mapping) == 0
    steps = 0
    for _ in prefault(mapping):
        steps += 1
        assert num_mapped(mapping) == min(SIZE, steps * STEP_BYTES) // PAGE
    assert steps == 3


def test_what_nobody_wrote_is_not_made(fd: int, mapping: Mapping) -> None:
    os.pwrite(fd, b"x", 0)
    os.pwrite(fd, b"x", 5 * PAGE)
    os.pwrite(fd, b"x", SIZE - 1)
    made = num_made(fd)
    assert made == 3
    assert sum(1 for _ in prefault(mapping)) == 3
    assert num_mapped(mapping) == made
    assert num_made(fd) == made


def test_a_mapping_that_begins_within_a_page(fd: int) -> None:
    os.pwrite(fd, bytes(SIZE), 0)
    late = map_memfd(fd, SIZE - 100, 100)
    assert list(prefault(late)) == [None] * 3
    assert num_mapped(late) == SIZE // PAGE
    late.unmap()


def test_it_ends_where_the_kernel_refuses(fd: int) -> None:
    os.pwrite(fd, bytes(SIZE), 0)
    with mmap.mmap(fd, SIZE, prot=mmap.PROT_READ):
        lines = Path("/proc/self/maps").read_text().splitlines()
        (start,) = (int(line.split("-")[0], 16) for line in lines if "memfd:kvxferd-populating" in line)
        assert list(prefault(Mapping(start, SIZE))) == []
