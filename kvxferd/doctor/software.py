"""Versions of the installed software."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator, Mapping, Sequence

import kvxferd
from kvxferd.doctor.nixl_read import read_between
from kvxferd.doctor.report import CheckContext, Finding, fail, ok, warn
from kvxferd.mover.backends import STORAGE_BACKENDS

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


def software(node: CheckContext) -> Iterator[Finding]:
    """Check the versions of Python, kvxferd, the transfer library and UCX."""
    versions = {name: version for name in _PACKAGES if (version := _version(name))}
    yield ok("python", f"{platform.python_version()}, kvxferd {kvxferd.__version__}", packages=versions)
    reading = read_between(node)
    if not reading.value:
        todo = f"{INSTALL}; without it there are no movers"
        if "mover.backend" in reading.failure:
            todo = "change the setting or the installation: the daemon has no movers with it"
        yield fail("nixl", reading.failure, todo, essential=True)
    else:
        plugins = reading.value["plugins"]
        ucx = f"UCX {reading.ucx_version}" if reading.ucx_version else "UCX of unknown version"
        found = f"{reading.value['library']}, {ucx}, plugins {', '.join(plugins)}"
        yield ok("nixl", found, plugins=plugins, ucx=reading.ucx_version)
        yield _backend(node, plugins, reading.value["parameters"])


def _backend(node: CheckContext, plugins: Sequence[str], parameters: Mapping[str, str]) -> Finding:
    """Return the chosen backend, and the choices. `parameters`: those that its plugin lists."""
    mover = node.config.mover
    choices = [name for name in plugins if name not in STORAGE_BACKENDS]
    found = f"{mover.backend} of {', '.join(choices)}"
    facts = {"backend": mover.backend, "choices": choices, "parameters": parameters}
    if unlisted := sorted(mover.backend_parameters.keys() - parameters.keys()):
        found += f"; its plugin does not list {', '.join(unlisted)} of mover.backend_parameters"
        todo = f"see that the names are right: it lists {', '.join(sorted(parameters)) or 'none'}"
        return warn("backend", found, todo, **facts)
    return ok("backend", found, **facts)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
