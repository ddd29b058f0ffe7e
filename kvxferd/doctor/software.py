"""Versions of the installed software."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping, Sequence

import kvxferd
from kvxferd.doctor.nixl_read import read_between
from kvxferd.doctor.report import CheckContext, Finding, fail, ok, warn
from kvxferd.mover.backends import STORAGE_BACKENDS, Backend
from kvxferd.mover.disconnects import provable_transports

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
        backend = Backend(node.config.mover.backend, node.config.mover.backend_parameters)
        yield _backend(backend, plugins, reading.value["parameters"])
    home = node.environment.get("HOME", "")
    if not os.access(home, os.R_OK | os.X_OK):
        yield warn(
            "home",
            f"HOME={home or '(unset)'} cannot be read by uid {os.geteuid()}; movers use / for it",
            "set HOME to a directory that this user can read, where .nixl.cfg is to be found",
        )


def _backend(backend: Backend, plugins: Sequence[str], parameters: Mapping[str, str]) -> Finding:
    """Return the chosen backend, the plugins that could be chosen, and what a lost connection proves.

    `parameters`: those that its plugin lists, with their defaults.
    """
    proves = sorted(provable_transports(backend))
    choices = [name for name in plugins if name not in STORAGE_BACKENDS]
    facts = {
        "backend": backend.name,
        "choices": choices,
        "parameters": parameters,
        "ends_reads_over": proves,
    }
    found = f"{backend.name} of {', '.join(choices)}; a lost connection " + (
        f"ends its reads over {', '.join(proves)} alone"
        if proves
        else "proves nothing with it: each costs the reader's mover"
    )
    if unlisted := sorted(backend.parameters.keys() - parameters.keys()):
        found += f"; its plugin does not list {', '.join(unlisted)} of mover.backend_parameters"
        todo = f"see that the names are right: it lists {', '.join(sorted(parameters)) or 'none'}"
        return warn("backend", found, todo, **facts)
    return ok("backend", found, **facts)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
