"""Versions of the installed software."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator

import kvxferd
from kvxferd.doctor.finding import CheckContext, Finding, fail, ok, warn
from kvxferd.doctor.nixl_read_test import read_between

_PACKAGES = (
    "msgspec",
    "pyzmq",
    "uvloop",
    "aiohttp",
    "numpy",
    "nixl",
    "rixl",
    "torch",
    "cuda-python",
    "cuda-bindings",
)
INSTALL = "pip install 'kvxferd[daemon,nixl]' into this environment"


def check(node: CheckContext) -> Iterator[Finding]:
    """Check the versions of Python, kvxferd, the transfer library and UCX."""
    versions = {name: version for name in _PACKAGES if (version := _version(name))}
    yield ok("python", f"{platform.python_version()}, kvxferd {kvxferd.__version__}", packages=versions)
    reading = read_between(node)
    if not reading.value:
        yield fail("nixl", reading.failure, f"{INSTALL}; without it there are no movers", essential=True)
    else:
        plugins = reading.value["plugins"]
        ucx = f"UCX {reading.ucx_version}" if reading.ucx_version else "UCX of unknown version"
        found = f"{reading.value['library']}, {ucx}, plugins {', '.join(plugins)}"
        yield ok("nixl", found, plugins=plugins, ucx=reading.ucx_version)
    home = node.environment.get("HOME", "")
    if not os.access(home, os.R_OK | os.X_OK):
        yield warn(
            "home",
            f"HOME={home or '(unset)'} cannot be read by uid {os.geteuid()}; movers use / for it",
            "set HOME to a directory that this user can read, where .nixl.cfg is to be found",
        )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
