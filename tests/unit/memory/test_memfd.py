"""Memory that one process makes and another maps."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator

import pytest

from kvxferd.errors import Code, EngineError
from kvxferd.memory import FencePage, SealedMemory, check_memfd, map_memfd
from kvxferd.wire.limits import FENCE_PAGE_BYTES, FENCE_SLOTS

F_SEAL_FUTURE_WRITE = 0x10  # Python names it from 3.13 on


@pytest.fixture
def memory() -> Iterator[SealedMemory]:
    with SealedMemory.create(1 << 20, "test") as made:
        yield made


def code_of(fd: int, needed: int) -> tuple[Code, str]:
    with pytest.raises(EngineError) as raised:
        check_memfd(fd, needed)
    return raised.value.code, raised.value.message


def test_a_mapping_begins_anywhere_in_a_page(memory: SealedMemory) -> None:
    offset = 3 * mmap.PAGESIZE + 100
    memory.buffer[offset - 3 : offset + 5] = b"...hello"
    before = num_mappings()
    unmapped, blanked = (map_memfd(memory.fd, mmap.PAGESIZE, offset) for _ in range(2))
    assert num_mappings() == before + 2
    assert bytes(unmapped.view()[:5]) == b"hello"
    unmapped.unmap()
    assert num_mappings() == before + 1
    blanked.blank()
    assert num_mappings() == before
    assert not any(blanked.view())
    blanked.unmap()


def num_mappings() -> int:
    with open("/proc/self/maps") as lines:
        return sum("memfd:test" in line for line in lines)


def test_what_is_no_memfd_is_refused(memory: SealedMemory) -> None:
    ends = os.pipe()
    assert code_of(ends[0], 1)[0] is Code.REGION_INVALID
    for fd in ends:
        os.close(fd)
    assert code_of(ends[0], 1)[0] is Code.REGION_INVALID  # closed
    with tempfile.TemporaryFile() as file:
        assert code_of(file.fileno(), 1)[0] in (Code.REGION_INVALID, Code.REGION_UNSEALED)
    readable = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY)
    assert code_of(readable, 1)[0] is Code.REGION_INVALID
    os.close(readable)


@pytest.mark.parametrize(("size", "offset"), [(0, 0), (-1, 0), (4096, -4096)])
def test_a_place_that_cannot_be_mapped_is_refused(memory: SealedMemory, size: int, offset: int) -> None:
    with pytest.raises(EngineError) as raised:
        map_memfd(memory.fd, size, offset)
    assert raised.value.code is Code.REGION_INVALID
    with pytest.raises(ValueError, match="cannot allocate 0 bytes"):
        SealedMemory.create(0)


def test_a_tensor_outlives_close() -> None:
    pytest.importorskip("torch")
    memory = SealedMemory.create(4096)
    tensor = memory.torch()
    tensor[:3] = 7
    assert memory.buffer[0:3] == b"\7\7\7"
    memory.close()
    assert tensor[0].item() == 7


@pytest.mark.parametrize("slot", [-1, FENCE_SLOTS])
def test_a_fence_slot_out_of_range_is_refused(slot: int) -> None:
    page = FencePage.create()
    with pytest.raises(ValueError, match="fence slot"):
        page.write(slot, bytes(16))
    with pytest.raises(ValueError, match="15 bytes"):
        page.write(0, bytes(15))
    page.close()


def test_a_page_to_hand_out_has_its_memory_and_can_be_sealed_no_further() -> None:
    daemon = FencePage.create()
    client, word = FencePage(os.dup(daemon.fd)), bytes(range(16))
    assert os.fstat(daemon.fd).st_blocks * 512 == FENCE_PAGE_BYTES
    with pytest.raises(PermissionError):
        fcntl.fcntl(client.fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
    mover = map_memfd(daemon.fd, FENCE_PAGE_BYTES)
    client.write(FENCE_SLOTS - 1, word)
    assert daemon.read(FENCE_SLOTS - 1) == bytes(mover.view()[-16:]) == word
    daemon.overwrite(FENCE_SLOTS - 1)
    assert bytes(mover.view()[-16:]) == client.read(FENCE_SLOTS - 1) != word
    assert client.read(FENCE_SLOTS - 2) == bytes(16)
    mover.unmap()
    for page in (client, daemon, daemon):
        page.close()


def test_a_page_that_its_client_seals_later_is_an_error_and_no_signal() -> None:
    page = FencePage(os.memfd_create("page", os.MFD_ALLOW_SEALING))
    os.ftruncate(page.fd, FENCE_PAGE_BYTES)
    fcntl.fcntl(page.fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
    with pytest.raises(PermissionError):
        page.overwrite(0)
    page.close()
