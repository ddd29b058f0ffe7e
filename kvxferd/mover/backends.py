"""The transfer library's backend that movers use: the setting `mover.backend` and its parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

UCX = "UCX"
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


def backend_to_text(backend: Backend) -> str:
    """Return an argument that gives a backend to a process that makes agents."""
    return json.dumps([backend.name, dict(backend.parameters)])


def backend_of_text(text: str) -> Backend:
    """Return the backend that `backend_to_text` wrote. Raises ValueError."""
    name, parameters = json.loads(text)
    return Backend(name, parameters)
