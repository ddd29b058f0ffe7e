"""Which process runs the mover of a rank whose cache is in GPU memory: the first placement that works.

exported: a child of the daemon, which maps the memory. The memory must have been allocated to be shared.
resident: a thread of this worker, which needs the transfer library here. Any GPU memory will do.

Both ask the driver, through cuda-python. Where none works, one message lists each, why it does not, and
the command that mends it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from kvxferd.errors import Code, DeviceError, EngineError, KvxferdError, MoverError

DOCTOR_HERE = "run where the daemon runs: kvxferd doctor --gpu"


class GpuPlacement(StrEnum):
    """The placements, by their names in the setting."""

    EXPORTED = "exported"
    RESIDENT = "resident"

    @property
    def meaning(self) -> str:
        """What it means for the engine, as a sentence of the log."""
        match self:
            case GpuPlacement.EXPORTED:
                return (
                    "Its mover is a process of the daemon: "
                    "a crash in it leaves this engine alone, and it can be killed"
                )
            case GpuPlacement.RESIDENT:
                return (
                    "Its mover is a thread of this worker: "
                    "a crash in it ends this engine, and it cannot be killed"
                )
            case _:
                assert_never(self)


@dataclass(frozen=True)
class PlacementFailure:
    """Why a placement does not work, and what mends it."""

    why: str
    mend: str  # "run: COMMAND", or what to change

    def __str__(self) -> str:
        return f"{self.why}; {self.mend}" if self.mend else self.why


# Codes that concern the placement alone, so that another may work.
_OF_PLACEMENT = frozenset(
    {
        Code.DEVICE_UNAVAILABLE,
        Code.DEVICE_ERROR,
        Code.REGION_NOT_EXPORTABLE,
        Code.NIXL_UNAVAILABLE,
        Code.MOVER_LOST,
    }
)
# What killed a mover outside would end the engine if it ran inside.
_NOT_TRIED_AFTER = frozenset({Code.MOVER_LOST})


def placements_for(setting: str) -> tuple[GpuPlacement, ...]:
    """Return the placements that `gpu_placement` allows, in the order in which they are tried."""
    return tuple(GpuPlacement) if setting == "auto" else (GpuPlacement(setting),)


class PlacementSearch:
    """The placements of one rank that are left to try, and why those before did not work."""

    def __init__(
        self, rank: str, setting: str, pool_failure: PlacementFailure | None = None, cuda: str = ""
    ) -> None:
        """`rank`: its name in messages. `cuda`: the CUDA version of this environment's torch, "13.0".

        `pool_failure`: why the cache is not in the connector's pool.
        """
        self._rank = rank
        self._left = list(placements_for(setting))
        self._pool_failure = pool_failure
        self._cuda = cuda
        self._failures: list[tuple[GpuPlacement, PlacementFailure]] = []

    @property
    def current(self) -> GpuPlacement:
        """The placement to try now."""
        return self._left[0]

    def fail(self, error: KvxferdError) -> None:
        """Go on to the next placement. Raises the error itself where no other would change it.

        Raises EngineError, with the error's code and all reasons, after the last placement.
        """
        if error.code not in _OF_PLACEMENT:
            raise error
        failed = self._left.pop(0)
        self._failures.append((failed, self._failure_of(failed, error)))
        if error.code in _NOT_TRIED_AFTER:
            untried = "not tried after that: what ended a mover outside would end this engine inside"
            insist = 'set "gpu_placement": "resident" to try it all the same'
            self._failures += [(placement, PlacementFailure(untried, insist)) for placement in self._left]
            self._left = []
        if not self._left:
            raise EngineError(self._refusal(), error.code) from error

    def _refusal(self) -> str:
        lines = [f"\n  {placement}: {failure}" for placement, failure in self._failures]
        return f"cannot register {self._rank}: no placement of its GPU memory works{''.join(lines)}"

    def report(self) -> str:
        """Return the line of the log once `current` works."""
        before = "".join(f"; {placement} does not work: {failure}" for placement, failure in self._failures)
        return f"placement of {self._rank}: {self.current}. {self.current.meaning}{before}"

    def _failure_of(self, placement: GpuPlacement, error: KvxferdError) -> PlacementFailure:
        if isinstance(error, DeviceError | MoverError):
            return self._failure_here(error)
        return PlacementFailure(
            f"the daemon refused it: {error.message} ({error.code})", _DAEMON_MENDS[error.code]
        )

    def _failure_here(self, error: KvxferdError) -> PlacementFailure:
        """Return why this process cannot do its part."""
        if isinstance(error.__cause__, ImportError):
            why = f"cuda-python is not installed in this environment ({error.__cause__})"
            return PlacementFailure(why, self._install_command())
        if error.code is Code.NIXL_UNAVAILABLE:
            return PlacementFailure(error.message, self._install_command())
        if error.code is Code.REGION_NOT_EXPORTABLE and self._pool_failure is not None:
            pool = self._pool_failure
            return PlacementFailure(
                f"{error.message}; it is not in the connector's pool: {pool.why}", pool.mend
            )
        if error.code is Code.REGION_NOT_EXPORTABLE:
            return PlacementFailure(error.message, DOCTOR_HERE)
        return PlacementFailure(error.message, "run: nvidia-smi -L")

    def _install_command(self) -> str:
        major = self._cuda.partition(".")[0]
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
