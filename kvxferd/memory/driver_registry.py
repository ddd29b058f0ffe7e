"""Chooses the driver that a process uses for device memory: CUDA's, unless the environment names another."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable

from kvxferd.errors import Code, DeviceError
from kvxferd.memory.driver import DRIVER_VARIABLE, Driver


def open_driver(name: str = "") -> Driver:
    """Return this process's driver. `name`: "cuda", "none" or MODULE:CLASS; "": the environment's, or cuda.

    Do not call it before a fork: children of a process that has used CUDA cannot use it. Raises
    DeviceError(device-unavailable) with what is missing.
    """
    return _open_once(name or os.environ.get(DRIVER_VARIABLE, "") or "cuda")


@functools.cache
def _open_once(chosen: str) -> Driver:
    if chosen == "none":
        raise DeviceError(
            f"cannot use a GPU: {DRIVER_VARIABLE} is set to none; unset it", Code.DEVICE_UNAVAILABLE
        )
    if chosen == "cuda":
        from kvxferd.memory.cuda import CudaDriver

        return CudaDriver()
    module, _, name = chosen.partition(":")
    try:
        make: Callable[[], Driver] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise DeviceError(
            f"cannot use driver {chosen!r}: {error}; {DRIVER_VARIABLE} is cuda, none or MODULE:CLASS",
            Code.DEVICE_UNAVAILABLE,
        ) from error
    return make()
