"""The kernel's three forms: its source, the PTX that is made of it, and the parameters that Python passes."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from array import array
from pathlib import Path

import pytest

from kvxferd.memory.cuda import COPY_ROWS, CopyParameters, copy_parameters
from kvxferd.memory.driver import PAIRS_PER_LAUNCH, Rows

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
    to, source = array("Q", [1 << 60, 5]), array("Q", [7, (1 << 64) - 1])
    packed = bytes(copy_parameters(memoryview(to), memoryview(source), Rows(100, 3, -8, 1 << 40)))
    numbers = array("Q", packed)
    assert numbers[:5].tolist() == [2, 3, 100, (1 << 64) - 8, 1 << 40]
    assert numbers[5:7] == to
    assert numbers[5 + PAIRS_PER_LAUNCH :][:2] == source
    assert not any(numbers[7 : 5 + PAIRS_PER_LAUNCH])


def test_sides_of_different_lengths_are_an_error() -> None:
    with pytest.raises(ValueError, match="different"):
        copy_parameters(memoryview(array("Q", [1, 2])), memoryview(array("Q", [1])), Rows(1))


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
