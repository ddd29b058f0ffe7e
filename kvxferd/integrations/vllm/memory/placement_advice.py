"""What mends a placement that does not work, as a sentence of the log or of the error.

`kvxferd.engine` tries the placements. Both of GPU memory ask the driver, through cuda-python.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from kvxferd.errors import Code, DeviceError, KvxferdError, MoverError

DOCTOR_HERE = "run where the daemon runs: kvxferd doctor --gpu"

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


@dataclass(frozen=True)
class PlacementFailure:
    """Why a placement does not work, and what mends it."""

    why: str
    mend: str  # "run: COMMAND", or what to change

    def __str__(self) -> str:
        return f"{self.why}; {self.mend}" if self.mend else self.why


def failure_of(error: KvxferdError, pool: PlacementFailure | None = None, cuda: str = "") -> PlacementFailure:
    """Return why a placement does not work, and what mends it.

    `pool`: why the cache is not in the connector's pool. `cuda`: the CUDA version of this environment's
    torch, "13.0".
    """
    if isinstance(
        cause := error.__cause__, KvxferdError
    ):  # memory that cannot be shared, in all its placements
        if cause.code is Code.REGION_INVALID:  # of the host
            return PlacementFailure(error.message, "")
        error = cause
    elif not isinstance(error, DeviceError | MoverError):
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
