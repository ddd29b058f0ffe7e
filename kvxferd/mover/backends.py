"""The transfer library's backend that movers use: the setting `mover.backend` and its parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

UCX = "UCX"
_VARIABLE = "KVXFERD_BACKEND"  # of this package's own processes alone; no setting
# Backends of NIXL that move data between memory and storage, and not between agents of two nodes.
STORAGE_BACKENDS = frozenset(
    {"AZURE_BLOB", "DOCA_MEMOS", "GDS", "GDS_MT", "GUSLI", "HF3FS", "INFINIA", "OBJ", "POSIX"}
)

# Parameters that movers fix, because the contract of transports does not hold with other values. nixl 1.5.1
# with num_workers = 2, without its own progress thread: an agent's read of its own memory never ends, and a
# notification ends the process (segmentation fault).
FIXED_PARAMETERS: Mapping[str, Mapping[str, str]] = {UCX: {"num_workers": "1", "num_threads": "0"}}


class Backend(NamedTuple):
    """A backend plugin by the name that the library gives it, and what it is created with."""

    name: str = UCX
    parameters: Mapping[str, str] = {}


DEFAULT_BACKEND = Backend()


def backend_environment(backend: Backend) -> dict[str, str]:
    """Return the variable that gives a backend to a process that makes agents.

    Parameters may be secrets: other users can read a process's arguments, and not its environment.
    """
    return {_VARIABLE: json.dumps([backend.name, dict(backend.parameters)])}


def take_backend(environment: MutableMapping[str, str]) -> Backend:
    """Remove the backend that `backend_environment` put there, and return it. Raises KeyError."""
    name, parameters = json.loads(environment.pop(_VARIABLE))
    return Backend(name, parameters)
