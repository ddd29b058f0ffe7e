"""GPUs: the driver, the devices by UUID, and how each can share its memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvxferd.doctor.finding import CheckContext, Finding, fail, ok, warn
from kvxferd.doctor.isolated import call_isolated, isolated
from kvxferd.errors import KvxferdError
from kvxferd.memory.driver import Device
from kvxferd.memory.driver_registry import open_driver
from kvxferd.tooling.output import format_bytes

DRIVER_TIMEOUT_S = 30.0  # the first call takes seconds if the driver is not kept loaded
EXPORTS_FD = "export as descriptor"
_VERSION = Path("/proc/driver/nvidia/version")


class DriverReport(NamedTuple):
    """The driver and its devices, or why it cannot be used."""

    name: str
    abilities: dict[str, str]
    devices: tuple[Device, ...]
    refusal: str = ""


def query_driver(_: object) -> DriverReport:
    """Return what the driver reports. A process that has used CUDA cannot fork one that does."""
    try:
        driver = open_driver()
        return DriverReport(driver.name, driver.describe(), driver.devices())
    except KvxferdError as error:
        return DriverReport("", {}, (), error.message)


def check(node: CheckContext) -> Iterator[Finding]:
    """Query the driver in a child process."""
    try:
        with isolated(object, node.environment) as child:
            driver = call_isolated(child, DRIVER_TIMEOUT_S, query_driver)
    except KvxferdError as error:
        yield fail("gpu", error.message, "see that the driver works: nvidia-smi")
        return
    if driver.refusal:
        found, _, todo = driver.refusal.partition("; ")
        yield fail(
            "gpu",
            found,
            todo or "install the driver and kvxferd[cuda], if this node has GPUs",
            kernel_module=_kernel_module(),
        )
        return
    for device in driver.devices:
        able = next((text for key, text in driver.abilities.items() if key.startswith(device.uuid)), "")
        found = f"{device.uuid}, {device.name}, {format_bytes(device.total_bytes)}, driver {driver.name}"
        facts = {"able": able, "kernel_module": _kernel_module(), **device._asdict()}
        if EXPORTS_FD in able:
            yield ok("gpu", f"{found}: {able}", **facts)
        else:
            todo = "its memory cannot go to a mover: use resident movers (docs/how-to/gpu-nodes.md)"
            yield warn("gpu", f"{found}: {able}", todo, **facts)
    if not driver.devices:
        todo = "unset CUDA_VISIBLE_DEVICES, or give the container GPUs"
        yield fail("gpu", f"driver {driver.name} shows none", todo)


def _kernel_module() -> str:
    try:
        return _VERSION.read_text().splitlines()[0]
    except OSError:
        return ""
