"""The pure core: what a node decides. No I/O; time is an argument.

`Node.feed(event, now)` returns effects, `Node.next_deadline()` says when to feed a `Tick`, and
`Node.check_integrity()` holds the invariants that tests check after every step.

Both names are imported when they are used: `kvxferd.records` is also for verbs of the command line,
which would wait for numpy and the planner.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxferd.core.node import Node
    from kvxferd.core.settings import Settings

__all__ = ["Node", "Settings"]

_MODULES = {"Node": "kvxferd.core.node", "Settings": "kvxferd.core.settings"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
