"""GPUs: the driver, the devices by UUID, and how each can share its memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvxferd.doctor.finding import CheckContext, Finding, fail, ok, warn
from kvxferd.tooling.isolated_process import run_isolated
from kvxferd.tooling.output import format_bytes

DRIVER_TIMEOUT_S = 30.0  # the first call takes seconds if the driver is not kept loaded
EXPORTS_FD = "export as descriptor"
_VERSION = Path("/proc/driver/nvidia/version")


def check(node: CheckContext) -> Iterator[Finding]:
    """Query the driver in a child process, because a process that has used CUDA cannot fork one that does."""
    outcome = run_isolated("kvxferd.doctor.gpu_query_process", [], node.environment, DRIVER_TIMEOUT_S)
    if outcome.value is None:
        yield fail("gpu", outcome.failure, "see that the driver works: nvidia-smi")
        return
    if why := outcome.value.get("refusal"):
        found, _, todo = why.partition("; ")
        yield fail(
            "gpu",
            found,
            todo or "install the driver and kvxferd[cuda], if this node has GPUs",
            kernel_module=_kernel_module(),
        )
        return
    name, described = outcome.value["name"], outcome.value["describe"]
    for device in outcome.value["devices"]:
        uuid = device["uuid"]
        able = next((text for key, text in described.items() if key.startswith(uuid)), "")
        found = f"{uuid}, {device['name']}, {format_bytes(device['total_bytes'])}, driver {name}"
        facts = {"able": able, "kernel_module": _kernel_module(), **device}
        if EXPORTS_FD in able:
            yield ok("gpu", f"{found}: {able}", **facts)
        else:
            todo = "its memory cannot go to a mover: use resident movers (docs/how-to/gpu-nodes.md)"
            yield warn("gpu", f"{found}: {able}", todo, **facts)
    if not outcome.value["devices"]:
        yield fail(
            "gpu", f"driver {name} shows none", "unset CUDA_VISIBLE_DEVICES, or give the container GPUs"
        )


def _kernel_module() -> str:
    try:
        return _VERSION.read_text().splitlines()[0]
    except OSError:
        return ""
