"""The kernel's three forms: its source, the PTX that is made of it, and the parameters that Python passes.

What the source does is tried on the processor, thread by thread; what the GPU makes of it, by
test_driver_contract.py where there is one.
"""

from __future__ import annotations

import ctypes
import random
import re
import shutil
import subprocess
from array import array
from pathlib import Path

import pytest

from kvxferd.memory.cuda import COPY_ROWS, CopyParameters, copy_parameters
from kvxferd.memory.driver import PAIRS_PER_LAUNCH, Rows
from tests.support.rows import SHAPES, SIZE_BYTES, addresses, copied

SOURCE = COPY_ROWS.with_suffix(".cu")
PTX = COPY_ROWS.read_text(encoding="ascii")


def test_the_ptx_suits_the_drivers_of_cuda_12_1() -> None:
    assert re.findall(r"^\.(?:version|target|address_size) .*$", PTX, re.M) == [
        ".version 8.1",
        ".target sm_75",
        ".address_size 64",
    ]


def test_the_parameters_are_as_large_and_as_aligned_as_the_ptx_declares_them() -> None:
    (declared,) = re.findall(r"\.visible \.entry copy_rows\(\s*(.*?)\s*\)", PTX, re.S)
    assert declared == f".param .align 8 .b8 copy_rows_param_0[{ctypes.sizeof(CopyParameters)}]"
    assert ctypes.alignment(CopyParameters) == 8
    assert ctypes.sizeof(CopyParameters) <= 32764
    assert ctypes.sizeof(CopyParameters) + 16 > 32764, "one more pair would not fit"


def test_python_has_the_sources_parameters_in_their_order() -> None:
    """All are 64-bit numbers, so the order and the size are the layout."""
    (declared,) = re.findall(r"struct Parameters \{(.*?)\n\};", SOURCE.read_text(encoding="ascii"), re.S)
    fields = re.findall(r"u64 (.*?);", declared)
    assert [name for some in fields for name in some.split(", ")] == [
        name if ctypes.sizeof(kind) == 8 else f"{name}[PAIRS_PER_LAUNCH]"
        for name, kind in CopyParameters._fields_
    ]
    assert f"constexpr unsigned PAIRS_PER_LAUNCH = {PAIRS_PER_LAUNCH};" in SOURCE.read_text(encoding="ascii")


def test_a_launchs_parameters_are_packed_side_by_side() -> None:
    to, source = addresses([1 << 60, 5]), addresses([7, (1 << 64) - 1])
    packed = bytes(copy_parameters(to, source, Rows(100, 3, -8, 1 << 40)))
    numbers = array("Q", packed)
    assert numbers[:5].tolist() == [2, 3, 100, (1 << 64) - 8, 1 << 40]
    assert numbers[5:7].tolist() == [1 << 60, 5]
    assert numbers[5 + PAIRS_PER_LAUNCH :][:2].tolist() == [7, (1 << 64) - 1]
    assert not any(numbers[7 : 5 + PAIRS_PER_LAUNCH])


def test_sides_of_different_lengths_are_an_error() -> None:
    with pytest.raises(ValueError, match="different"):
        copy_parameters(addresses([1, 2]), addresses([1]), Rows(1))


# As much of CUDA C as the source uses. An access that is not aligned traps.
ON_THE_PROCESSOR = """
#include <algorithm>
using std::min;
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct { unsigned x; } blockIdx, blockDim, gridDim, threadIdx;
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(num_threads)
#include "copy_rows.cu"
extern "C" void launch(const Parameters *parameters, unsigned num_blocks) {
    gridDim.x = num_blocks;
    blockDim.x = 256;
    for (blockIdx.x = 0; blockIdx.x < num_blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++) copy_rows(*parameters);
}
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernel as a function of the processor."""
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("there is no g++ to compile the kernel for the processor with")
    directory = tmp_path_factory.mktemp("kernel")
    (directory / "launch.cc").write_text(ON_THE_PROCESSOR)
    flags = ("-O1", "-shared", "-fPIC", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
    command = [compiler, *flags, f"-I{SOURCE.parent}", "-o", "kernel.so", "launch.cc"]
    subprocess.run(command, cwd=directory, check=True)
    return ctypes.CDLL(str(directory / "kernel.so"))


@pytest.mark.parametrize("num_blocks", [1, 3, 64])
@pytest.mark.parametrize(("rows", "pairs"), SHAPES)
def test_the_kernel_writes_its_rows_and_nothing_else(
    kernel: ctypes.CDLL, rows: Rows, pairs: list[tuple[int, int]], num_blocks: int
) -> None:
    content, before = (random.Random(seed).randbytes(SIZE_BYTES) for seed in (1, 2))
    memory = (ctypes.c_char * (2 * SIZE_BYTES + 16))()
    target = -(-ctypes.addressof(memory) // 16) * 16
    source = target + SIZE_BYTES
    ctypes.memmove(source, content, SIZE_BYTES)
    ctypes.memmove(target, before, SIZE_BYTES)
    for first in range(0, len(pairs), PAIRS_PER_LAUNCH):
        few = pairs[first : first + PAIRS_PER_LAUNCH]
        to = addresses(target + offset for offset, _ in few)
        origin = addresses(source + offset for _, offset in few)
        kernel.launch(ctypes.byref(copy_parameters(to, origin, rows)), num_blocks)
    assert ctypes.string_at(target, SIZE_BYTES) == copied(rows, pairs, content, before)


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90"])
def test_the_ptx_can_be_assembled(architecture: str, tmp_path: Path) -> None:
    if (ptxas := shutil.which("ptxas")) is None:
        pytest.skip("there is no ptxas to assemble PTX with")
    command = [ptxas, f"-arch={architecture}", "-v", "-o", str(tmp_path / "copy_rows.cubin"), str(COPY_ROWS)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in ran.stderr


def test_the_ptx_is_made_of_the_source(tmp_path: Path) -> None:
    """By the compiler that the source names: another one's differs."""
    nvcc = shutil.which("nvcc")
    if nvcc is None or "release 13.0, V13.0.88" not in subprocess.check_output(
        [nvcc, "--version"], text=True
    ):
        pytest.skip("there is no nvcc 13.0.88 to make the PTX with")
    made = tmp_path / "copy_rows.ptx"
    subprocess.run([nvcc, "-ptx", "-arch=compute_75", "-o", made, SOURCE], check=True)
    assert re.sub(r"(?m)^\.version .*$", ".version 8.1", made.read_text()) == PTX
