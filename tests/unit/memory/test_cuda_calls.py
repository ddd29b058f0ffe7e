"""The file that touches CUDA, against a stand-in for the driver's library.

It shows that every call has the name, the arguments and the results that cuda-python has. What CUDA
does, it cannot show: for that there are the same tests on a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxferd.mover.transport.copy_probe import SHAPES
from tests.support import cuda_stub
from tests.support.python_process import run_python
from tests.support.repository import ROOT

pytestmark = pytest.mark.process

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a libcuda.so.1 in it."""
    pytest.importorskip("cuda.bindings", reason="cuda-python is not installed (kvxferd[cuda])")
    if cuda_stub.compiler() is None:
        pytest.skip("there is no C compiler to build the stand-in with")
    return cuda_stub.build(tmp_path_factory.mktemp("stub"))


def contract(stub: Path, which: str, **settings: object) -> str:
    """Run tests of the driver's contract over the stand-in; return their last line."""
    tests = ("-m", "pytest", "-q", "-k", which, HERE / "test_driver_contract.py")
    ran = run_python(*tests, env=cuda_stub.environment(stub, **settings), cwd=ROOT)
    assert ran.returncode == 0, ran.stdout[-3000:]
    return ran.stdout.strip().splitlines()[-1]


def test_the_drivers_contract_through_cuda_python(stub: Path) -> None:
    summary = contract(stub, "cuda")
    assert "passed" in summary
    assert "skipped" not in summary


def said_by(stub: Path, program: str, **settings: object) -> str:
    ran = run_python("-c", program, env=cuda_stub.environment(stub, **settings), cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_a_device_is_named_by_its_own_uuid_and_not_by_its_cards(stub: Path) -> None:
    """Slices of one card (MIG) differ by it; the older call tells of the card."""
    requested = "from kvxferd.memory.cuda import CudaDriver; print(CudaDriver().devices()[0].uuid)"
    assert said_by(stub, requested) == "GPU-abababab-abab-abab-abab-abababababab"


IMPORT = """
import os
from kvxferd.errors import DeviceError
from kvxferd.memory.cuda import CudaDriver
from tests.support.devices import used_bytes
driver = CudaDriver()
uuid = driver.devices()[0].uuid
handle = driver.create(uuid, driver.granularity(uuid))
fd = driver.export(handle)
driver.release(handle)
try:
    driver.import_fd(uuid, fd, driver.granularity(uuid))
    print("imported")
except DeviceError as error:
    print(error.code.value, error.message)
os.close(fd)
print(used_bytes(driver, uuid))
"""


@pytest.mark.parametrize(
    ("kind", "number", "why"),
    [
        ("1", "7", "it is on device 7"),  # one that this process does not see
        ("1", "-1", "it is on device -1"),
        ("3", "0", "it is on no device"),  # a host's NUMA node 0 is not GPU 0
    ],
)
def test_memory_that_is_elsewhere_is_refused_and_let_go(stub: Path, kind: str, number: str, why: str) -> None:
    said, used = said_by(stub, IMPORT, LOCATION_TYPE=kind, LOCATION_ID=number).splitlines()
    assert said.startswith("region-invalid cannot import memory of GPU-")
    assert why in said
    assert used == "0"


PROBE = """
from kvxferd.memory.cuda import CudaDriver
from kvxferd.mover.transport.copy_probe import probe_copy_rows
driver = CudaDriver()
print(*(repr(probe_copy_rows(driver, device.uuid)) for device in driver.devices()))
"""


def test_copies_of_rows_pass_the_probe(stub: Path, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    assert said_by(stub, PROBE, LOG=log) == "''"
    calls = log.read_text().splitlines()
    assert sum(call.endswith("module loaded") for call in calls) == 1
    assert sum("rows copied" in call for call in calls) == 3 * len(SHAPES)


def test_each_device_has_its_own_kernel(stub: Path) -> None:
    """Also where it has one multiprocessor: a slice of a card."""
    assert said_by(stub, PROBE, DEVICES=2, PROCESSORS=1) == "'' ''"


def test_a_kernel_that_is_not_installed_is_no_end_of_direct_reads(stub: Path) -> None:
    lost = PROBE.replace("driver = ", "import kvxferd.memory.cuda as c; c.COPY_ROWS /= 'lost'; driver = ")
    assert "cannot load the kernel that copies rows: " in said_by(stub, lost)


def test_a_driver_that_takes_no_such_kernel_says_why(stub: Path) -> None:
    said = said_by(stub, PROBE, KERNELS=0)
    assert said == (
        "'cannot cuModuleLoadData: the provided PTX was compiled with an unsupported toolchain. "
        "(CUDA_ERROR_UNSUPPORTED_PTX_VERSION)'"
    )


@pytest.mark.parametrize(
    ("settings", "order"),
    [
        ({"WRITES_ORDERING": "200"}, "native"),
        ({"WRITES_ORDERING": "100", "FLUSH_OPTIONS": "0"}, "native"),
        ({"FLUSH_OPTIONS": "1"}, "flush"),
        ({"FLUSH_OPTIONS": "3"}, "flush"),
        ({"FLUSH_OPTIONS": "2"}, "none"),  # by a stream's memory operations alone
        ({"FLUSH_OPTIONS": "0"}, "none"),
        ({"FLUSH_OPTIONS": "0", "RDMA": "0"}, "native"),  # no card writes there
    ],
)
def test_what_writes_of_a_network_card_need(stub: Path, settings: dict[str, object], order: str) -> None:
    requested = "from kvxferd.memory.cuda import CudaDriver; d = CudaDriver(); "
    requested += "print(d.write_order(d.devices()[0].uuid).value)"
    assert said_by(stub, requested, **settings) == order
