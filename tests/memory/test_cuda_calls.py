"""The file that touches CUDA, against a stand-in for the driver's library.

It shows that every call has the name, the arguments and the results that cuda-python has. What CUDA
does, it cannot show: for that there are the same tests on a GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a libcuda.so.1 in it."""
    pytest.importorskip("cuda.bindings", reason="cuda-python is not installed (kvxferd[cuda])")
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no C compiler to build the stand-in with")
    made = tmp_path_factory.mktemp("stub") / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler, *flags, "-o", made, HERE / "stub_cuda.c", "-ldl"], check=True)
    return made.parent


def test_the_drivers_contract_through_cuda_python(stub: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", "cuda", HERE / "test_driver_contract.py"],
        env={**os.environ, "LD_LIBRARY_PATH": str(stub)},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    summary = ran.stdout.strip().splitlines()[-1]
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert "passed" in summary
    assert "skipped" not in summary
