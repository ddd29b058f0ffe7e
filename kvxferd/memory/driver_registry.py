"""Chooses the driver that a process uses for device memory: CUDA's, or the fake one."""

from __future__ import annotations

import functools
import os

from kvxferd.errors import Code, DeviceError
from kvxferd.memory.driver import DRIVER_VARIABLE, Driver


def open_driver(name: str = "") -> Driver:
    """Return this process's driver. `name`: "cuda", "fake" or "none"; "": the environment's, or else cuda.

    Do not call it before a fork: children of a process that has used CUDA cannot use it. Raises
    DeviceError(device-unavailable) with what is missing.
    """
    return _open_once(name or os.environ.get(DRIVER_VARIABLE, "") or "cuda")


@functools.cache
def _open_once(chosen: str) -> Driver:
    if chosen == "cuda":
        from kvxferd.memory.cuda import CudaDriver

        return CudaDriver()
    if chosen == "fake":
        from kvxferd.memory.fake_driver import FakeDriver

        return FakeDriver()
    if chosen == "none":
        raise DeviceError(
            f"cannot use a GPU: {DRIVER_VARIABLE} is set to none; unset it", Code.DEVICE_UNAVAILABLE
        )
    raise DeviceError(
        f"cannot use driver {chosen!r}: there are cuda, fake and none ({DRIVER_VARIABLE})",
        Code.DEVICE_UNAVAILABLE,
    )
