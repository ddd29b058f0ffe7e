"""Whether UCX and a network card can read GPU memory: UCX's settings and CUDA part, peermem or dma-buf."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from kvxferd.doctor.finding import CheckContext, Finding, fail, ok, warn
from kvxferd.doctor.network_cards import rdma_cards
from kvxferd.mover.backends import UCX
from kvxferd.mover.ucx_settings import describe_gpu_settings, has_nvidia_gpu

_PEERMEM = tuple(Path("/sys/module", name) for name in ("nvidia_peermem", "nv_peer_mem"))
_DRIVER = Path("/proc/driver/nvidia/version")


def check(node: CheckContext) -> Iterator[Finding]:
    """Check kernel and UCX support; yield nothing if there is no GPU."""
    if node.config.mover.backend == UCX and has_nvidia_gpu():
        yield ok("ucx settings", ", ".join(describe_gpu_settings(node.environment)))
    if not _DRIVER.exists():
        return
    libraries = _cuda_libraries()
    if not libraries:
        yield warn(
            "ucx cuda",
            "UCX's CUDA part is not installed",
            "use NIXL's wheel for this CUDA version (nixl-cu12, nixl-cu13): GPU memory is staged without it",
        )
    else:
        yield ok("ucx cuda", ", ".join(libraries))
    if not rdma_cards():
        return
    loaded = [path.name for path in _PEERMEM if path.exists()]
    if loaded:
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
