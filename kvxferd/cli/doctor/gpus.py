"""GPUs: the driver, the devices by UUID, and what each lets another process or a card do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvxferd.cli.doctor.apart import run_apart
from kvxferd.cli.doctor.finding import Finding, Node, no, ok, warn
from kvxferd.cli.showing import in_bytes
from kvxferd.memory.driver import DRIVER_VARIABLE

LIMIT_S = 30.0  # the first call into a driver that is not kept loaded takes seconds
EXPORT = "export as descriptor"
_VERSION = Path("/proc/driver/nvidia/version")


def check(node: Node) -> Iterator[Finding]:
    """Ask the driver, in a process of its own: one that has used CUDA cannot have children that do."""
    outcome = run_apart("kvxferd.cli.doctor.seeing_gpus", [], node.environment, LIMIT_S)
    if outcome.value is None:
        yield no("gpu", outcome.refusal, "see that the driver works: nvidia-smi")
        return
    if why := outcome.value.get("refusal"):
        found, _, todo = why.partition("; ")
        yield no(
            "gpu",
            found,
            todo or "install the driver and kvxferd[cuda], if this node has GPUs",
            kernel_module=_module(),
        )
        return
    name, described = outcome.value["name"], outcome.value["describe"]
    for device in outcome.value["devices"]:
        uuid = device["uuid"]
        able = next((text for key, text in described.items() if key.startswith(uuid)), "")
        found = f"{uuid}, {device['name']}, {in_bytes(device['total_bytes'])}, driver {name}"
        facts = {"able": able, "kernel_module": _module(), **device}
        if EXPORT in able or node.environment.get(DRIVER_VARIABLE) == "fake":
            yield ok("gpu", f"{found}: {able or 'fake'}", **facts)
        else:
            todo = "its memory cannot go to a mover: use resident movers (docs/how-to/gpu-nodes.md)"
            yield warn("gpu", f"{found}: {able}", todo, **facts)
    if not outcome.value["devices"]:
        yield no("gpu", f"driver {name} shows none", "unset CUDA_VISIBLE_DEVICES, or give the container GPUs")


def _module() -> str:
    try:
        return _VERSION.read_text().splitlines()[0]
    except OSError:
        return ""
