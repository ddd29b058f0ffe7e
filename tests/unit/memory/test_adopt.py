"""Adopting the pages of torch's own tensors. What could take the process down happens in children."""

import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from kvxferd.errors import Code, EngineError
from kvxferd.memory import map_memfd
from kvxferd.memory.adopt import Adopted, adopt
from tests.support.open_fds import num_open_fds

MIB = 1 << 20


def adopt_tensor(tensor: torch.Tensor) -> Adopted:
    return adopt(tensor.data_ptr(), tensor.nbytes)


@pytest.fixture
def numbers() -> torch.Tensor:
    return torch.arange(5 * MIB, dtype=torch.int64)  # 40 MiB: three steps, the last one short


@pytest.fixture
def adopted(numbers: torch.Tensor) -> Iterator[Adopted]:
    found = adopt_tensor(numbers)
    yield found
    found.memory.close()


def mappings_named(name: str) -> list[str]:
    with open("/proc/self/maps") as lines:
        return [line for line in lines if name in line]


class TestAdopted:
    def test_what_another_mapping_writes_is_seen_and_the_other_way_round(
        self, numbers: torch.Tensor, adopted: Adopted
    ) -> None:
        assert torch.equal(numbers, torch.arange(5 * MIB, dtype=torch.int64)), "as before"
        other = map_memfd(adopted.memory.fd, adopted.memory.size_bytes)
        lead = adopted.offset
        view = other.view()
        view[lead + 8 : lead + 16] = (-7).to_bytes(8, "little", signed=True)
        numbers[3 * MIB] = 77
        assert numbers[1] == -7
        assert view[lead + 24 * MIB] == 77
        view.release()
        other.unmap()

    def test_pages_of_zeros_take_no_memory(self) -> None:
        zeros = torch.zeros(64 * MIB, dtype=torch.uint8)
        found = adopt_tensor(zeros)
        # The header's page, and those of the step that it is in.
        assert os.fstat(found.memory.fd).st_blocks * 512 <= 16 * MIB
        assert not zeros.any()
        found.memory.close()

    def test_freeing_the_tensor_unmaps_it_and_the_descriptor_keeps_the_content(
        self, numbers: torch.Tensor
    ) -> None:
        found = adopt_tensor(numbers)
        lead = found.offset
        numbers[5] = 55
        name = "memfd:kvxferd-adopted (deleted)"
        view = numbers.view(torch.uint8)
        assert len(mappings_named(name)) == 2  # the tensor's and the memory's own
        del view
        numbers.set_(torch.empty(0, dtype=torch.int64))  # the fixture holds the tensor: let go of the storage
        gc.collect()
        assert len(mappings_named(name)) == 1
        assert os.pread(found.memory.fd, 8, lead + 40) == (55).to_bytes(8, "little")
        found.memory.close()
        assert mappings_named(name) == []


class TestRefused:
    def refusal(self, *args: int, **more: int) -> str:
        with pytest.raises(EngineError) as caught:
            adopt(*args, **more)
        assert caught.value.code is Code.REGION_INVALID
        return caught.value.message

    def test_what_is_no_block_that_glibc_has_mapped_by_itself(
        self, numbers: torch.Tensor, adopted: Adopted
    ) -> None:
        small = torch.ones(1024, dtype=torch.uint8)
        assert "cannot adopt" in self.refusal(small.data_ptr(), small.nbytes)
        assert bool((small == 1).all())
        assert "private anonymous memory" in self.refusal(numbers.data_ptr(), numbers.nbytes), "it is adopted"

    def test_a_part_of_a_block(self, numbers: torch.Tensor) -> None:
        address, size = numbers.data_ptr(), numbers.nbytes
        assert "not the whole block" in self.refusal(address, size - 2 * mmap.PAGESIZE)
        assert "glibc has not mapped it by itself" in self.refusal(address + 4 * MIB, size)
        before = num_open_fds()
        assert "not the whole block" in self.refusal(address, size + mmap.PAGESIZE)
        assert num_open_fds() == before
        assert mappings_named("kvxferd-adopted") == []

    @pytest.mark.process
    def test_an_allocator_that_is_not_glibcs(self, tmp_path: object) -> None:
        """A library in front of malloc, as tcmalloc is: its blocks share their mappings."""
        library = f"{tmp_path}/libother.so"
        source = (
            "extern void *__libc_malloc(unsigned long);"
            "extern void *__libc_memalign(unsigned long, unsigned long);"
            "void *malloc(unsigned long size) { return __libc_malloc(size); }"
            "int posix_memalign(void **to, unsigned long at, unsigned long size)"
            "{ *to = __libc_memalign(at, size); return 0; }"
        )
        built = subprocess.run(
            ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=source, text=True, check=False
        )
        if built.returncode:
            pytest.skip("no C compiler to build an allocator with")
        code = (
            "import ctypes; from kvxferd.memory.adopt import adopt\n"
            "malloc = ctypes.CDLL(None).malloc; malloc.restype = ctypes.c_void_p\n"
            "address = malloc(64 << 20)\n"
            "ctypes.memset(address, 7, 64 << 20)\n"
            "try: adopt(address, 64 << 20)\n"
            "except Exception as error: print(error.code, error.message)\n"
            "assert ctypes.string_at(address, 64 << 20) == bytes([7]) * (64 << 20)"
        )
        environ = os.environ | {"LD_PRELOAD": library}
        ran = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
        )
        assert "region-invalid" in ran.stdout
        assert "libother.so" in ran.stdout
