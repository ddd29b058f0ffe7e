"""GPUs: the driver, the devices by UUID, how each shares its memory, and whether UCX and cards read it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvxferd.doctor.isolated import call_isolated, isolated
from kvxferd.doctor.network import rdma_cards
from kvxferd.doctor.report import CheckContext, Finding, fail, ok, warn
from kvxferd.errors import KvxferdError
from kvxferd.memory.driver import Device
from kvxferd.memory.driver_registry import open_driver
from kvxferd.mover.backends import UCX
from kvxferd.mover.ucx_settings import describe_gpu_settings, has_nvidia_gpu
from kvxferd.telemetry.units import format_size

DRIVER_TIMEOUT_S = 30.0  # the first call takes seconds if the driver is not kept loaded
EXPORTS_FD = "export as descriptor"
_DRIVER_VERSION = Path("/proc/driver/nvidia/version")
_PEERMEM = tuple(Path("/sys/module", name) for name in ("nvidia_peermem", "nv_peer_mem"))


class DriverReport(NamedTuple):
    """The driver and its devices."""

    name: str
    abilities: dict[str, str]
    devices: tuple[Device, ...]


def query_driver(_: object) -> DriverReport:
    """Return what the driver reports. A process that has used CUDA cannot fork one that does."""
    driver = open_driver()
    return DriverReport(driver.name, driver.describe(), driver.devices())


def gpus(node: CheckContext) -> Iterator[Finding]:
    """Query the driver in a child process."""
    try:
        with isolated(object, node.environment) as child:
            driver = call_isolated(child, DRIVER_TIMEOUT_S, query_driver)
    except KvxferdError as error:
        found, _, todo = error.message.partition("; ")
        usual = "if this node has GPUs, see that the driver works (nvidia-smi), and install kvxferd[cuda]"
        yield fail("gpu", found, todo or usual, kernel_module=_kernel_module())
        return
    for device in driver.devices:
        able = next((text for key, text in driver.abilities.items() if key.startswith(device.uuid)), "")
        size = format_size(device.total_bytes)
        found = f"{device.uuid}, {device.name}, {size}, driver {driver.name}: {able}"
        facts = {"able": able, "kernel_module": _kernel_module(), **device._asdict()}
        if EXPORTS_FD in able:
            yield ok("gpu", found, **facts)
        else:
            todo = "its memory cannot go to a mover: use resident movers (docs/how-to/gpu-nodes.md)"
            yield warn("gpu", found, todo, **facts)
    if not driver.devices:
        todo = "unset CUDA_VISIBLE_DEVICES, or give the container GPUs"
        yield fail("gpu", f"driver {driver.name} shows none", todo)


def _kernel_module() -> str:
    try:
        return _DRIVER_VERSION.read_text().splitlines()[0]
    except OSError:
        return ""


def gpu_direct(node: CheckContext) -> Iterator[Finding]:
    """Check UCX's settings and CUDA part, and peermem or dma-buf; yield nothing if there is no GPU."""
    if node.config.mover.backend == UCX and has_nvidia_gpu():
        yield ok("ucx settings", ", ".join(describe_gpu_settings(node.environment)))
    if not _DRIVER_VERSION.exists():
        return
    libraries = _cuda_libraries()
    if libraries:
        yield ok("ucx cuda", ", ".join(libraries))
    else:
        yield warn(
            "ucx cuda",
            "UCX's CUDA part is not installed",
            "use NIXL's wheel for this CUDA version (nixl-cu12, nixl-cu13): GPU memory is staged without it",
        )
    if not rdma_cards():
        return
    if loaded := [path.name for path in _PEERMEM if path.exists()]:
        yield ok("gpudirect", f"{loaded[0]} is loaded")
    else:
        yield fail(
            "gpudirect",
            "nvidia_peermem is not loaded; the row of the GPU says whether it has dma-buf",
            "modprobe nvidia_peermem, or an open kernel driver with dma-buf and a kernel of 5.12 or newer",
        )


def _cuda_libraries() -> list[str]:
    """Return the directories of NIXL's wheels that hold UCX for CUDA."""
    spec = importlib.util.find_spec("nixl")
    if spec is None or spec.origin is None:
        return []
    site = Path(spec.origin).parents[1]
    return sorted({path.parents[1].name for path in site.glob("nixl_cu*.libs/ucx/libuct_cuda.so*")})
