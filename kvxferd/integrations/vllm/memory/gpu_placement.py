"""The placements of a rank whose cache is in GPU memory, and what mends each that does not work.

exported: a child of the daemon, which maps the memory. The memory must have been allocated to be shared.
resident: a thread of this worker, which needs the transfer library here. Any GPU memory will do.

Both ask the driver, through cuda-python. `kvxferd.engine.placement_search` goes from one to the next.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from kvxferd.engine.placement_search import PlacementSearch
from kvxferd.errors import Code, DeviceError, KvxferdError, MoverError
from kvxferd.memory import MemoryPlacement

DOCTOR_HERE = "run where the daemon runs: kvxferd doctor --gpu"


@dataclass(frozen=True)
class PlacementFailure:
    """Why a placement does not work, and what mends it."""

    why: str
    mend: str  # "run: COMMAND", or what to change

    def __str__(self) -> str:
        return f"{self.why}; {self.mend}" if self.mend else self.why


def placements_for(setting: str) -> tuple[MemoryPlacement, ...]:
    """Return the placements that `gpu_placement` allows, in the order in which they are tried."""
    if setting == "auto":
        return MemoryPlacement.EXPORTED, MemoryPlacement.RESIDENT
    return (MemoryPlacement(setting),)


def gpu_placement_search(
    rank: str, setting: str, pool_failure: PlacementFailure | None = None, cuda: str = ""
) -> PlacementSearch:
    """Return the search for the placement of one rank's cache.

    `rank`: its name in messages. `setting`: `gpu_placement`. `pool_failure`: why the cache is not in the
    connector's pool. `cuda`: the CUDA version of this environment's torch, "13.0".
    """
    return PlacementSearch(
        rank,
        placements_for(setting),
        lambda error: str(_failure_of(error, pool_failure, cuda)),
        memory="GPU memory",
        insist='set "gpu_placement": "resident" to try it all the same',
    )


def _failure_of(error: KvxferdError, pool: PlacementFailure | None, cuda: str) -> PlacementFailure:
    if not isinstance(error, DeviceError | MoverError):
        return PlacementFailure(
            f"the daemon refused it: {error.message} ({error.code})", _DAEMON_MENDS[error.code]
        )
    if isinstance(error.__cause__, ImportError):
        why = f"cuda-python is not installed in this environment ({error.__cause__})"
        return PlacementFailure(why, _install_command(cuda))
    if error.code is Code.NIXL_UNAVAILABLE:
        return PlacementFailure(error.message, _install_command(cuda))
    if error.code is Code.REGION_NOT_EXPORTABLE and pool is not None:
        return PlacementFailure(f"{error.message}; it is not in the connector's pool: {pool.why}", pool.mend)
    mend = DOCTOR_HERE if error.code is Code.REGION_NOT_EXPORTABLE else "run: nvidia-smi -L"
    return PlacementFailure(error.message, mend)


def _install_command(cuda: str) -> str:
    major = cuda.partition(".")[0]
    extra = f"engine-gpu-cu{major}" if major in ("12", "13") else "engine-gpu"
    return f"run: {sys.executable} -m pip install 'kvxferd[{extra}]'"


_DAEMON_MENDS = {
    Code.DEVICE_UNAVAILABLE: DOCTOR_HERE,
    Code.DEVICE_ERROR: (
        f"{DOCTOR_HERE}; if the GPU is full, start the engine with a lower "
        "--gpu-memory-utilization: the mover's context takes about 500 MiB"
    ),
    Code.REGION_NOT_EXPORTABLE: DOCTOR_HERE,
    Code.NIXL_UNAVAILABLE: "run in the daemon's environment: kvxferd doctor --check software",
    Code.MOVER_LOST: f"read the daemon's log; {DOCTOR_HERE}",
}
