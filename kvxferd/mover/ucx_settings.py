"""The settings of UCX that kvxferd chooses on a node with an NVIDIA GPU.

They are environment variables. A value that the operator has set stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"  # of PCI's base classes: VGA and 3D controllers

GPU_DEFAULTS: Mapping[str, str] = {
    # Movers only read, and between GPUs without active NVLinks UCX reads by cuda_ipc with this alone. Without
    # it such reads go over TCP: 0.5 instead of 49 GB/s (nixl#2208, vllm#52607).
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
    # With its cache UCX keeps what it maps of another process until this one ends, so that the memory of a
    # source that was killed is not freed. Without it many runs are read as fast
    # (docs/adr/0051-gpu-placements.md).
    "UCX_CUDA_IPC_CACHE": "n",
    # With its cache UCX knows GPU memory by functions of the driver that it has patched. A caller that has
    # their addresses from cuGetProcAddress, as cuda-python has, may pass the patch by, and NIXL then refuses
    # the memory ("detected as host"). Without it UCX queries the driver, once for each registration.
    "UCX_MEMTYPE_CACHE": "n",
}


def has_nvidia_gpu() -> bool:
    """Whether the PCI bus has one. NIXL looks there too, where containers see all GPUs of their node."""
    return any(
        _read(device / "vendor") == _NVIDIA and _read(device / "class").startswith(_DISPLAY_CLASS)
        for device in _PCI_DEVICES.glob("*")
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def tls_with_cuda(transports: str) -> str:
    """Return the text of `UCX_TLS` for these transports.

    Where the node has an NVIDIA GPU it ends with cuda_copy: NIXL makes no agent there without it.
    """
    return f"{transports},cuda_copy" if has_nvidia_gpu() else transports


def set_gpu_defaults(environ: MutableMapping[str, str]) -> None:
    """Set what the operator has not. Call it before UCX is loaded, which reads some of it only then.

    Nothing is set without a GPU: UCX warns of settings of a transport that it does not load.
    """
    if has_nvidia_gpu():
        for name, value in GPU_DEFAULTS.items():
            environ.setdefault(name, value)


def describe_gpu_settings(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield each setting with its value in force on a GPU node, and whose choice that is."""
    for name, value in GPU_DEFAULTS.items():
        given = environ.get(name)
        yield f"{name}={value} (default)" if given is None else f"{name}={given} (set here)"
