"""A digest of everything reachable from an object that can change what it does next.

Nothing is listed by hand: attributes, containers and the cells of closures are all walked, so that a
field that the core gets tomorrow counts too. Times count as seconds from the node's own now.
"""

from __future__ import annotations

import hashlib
import itertools
import marshal
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from typing import Any

import msgspec

from kvxferd.plan import Expander, PlannedReads, TransferTopology
from kvxferd.timers import Timers

# A clock starts here. Durations stay far below, so a float tells which it is.
CLOCK_START = float(1 << 20)

# Shown to people or kept for speed, or far from any limit; no decision reads them.
SHOWN = {
    "now",
    "phases_s",
    "received_at",
    "started_at",
    "learnt_at",
    "posted_at",
    "published_at",
    "num_ended_unsent",
    "_num_ended_before",
}
IGNORED = SHOWN | {"__weakref__"}
CACHES = (PlannedReads, Expander)


class _Walk:
    """One walk. What was met before is named by its number."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.met: dict[int, int] = {}
        self.kept: list[object] = []  # else an id could be given to another object
        self.out: list[Any] = []

    def walk(self, item: Any) -> None:
        kind = type(item)
        act = _BY_TYPE.get(kind)
        if act is None:
            act = _BY_TYPE[kind] = _choose(item)
        act(self, item)

    def is_new(self, item: object) -> bool:
        number = self.met.get(id(item))
        if number is not None:
            self.out.append(("met", number))
            return False
        self.met[id(item)] = len(self.met)
        self.kept.append(item)
        return True

    def plain(self, item: Any) -> None:
        self.out.append(item)

    def float(self, item: float) -> None:
        self.out.append(item - self.now if item > CLOCK_START / 2 else item)

    def enum(self, item: Enum) -> None:
        self.out.append(str(item))

    def struct(self, item: msgspec.Struct) -> None:
        self.out.append(msgspec.msgpack.encode(item))

    def raw(self, item: msgspec.Raw) -> None:
        self.out.append(bytes(item))

    def tuple(self, item: tuple[Any, ...]) -> None:
        self.out.append(len(item))
        for value in item:
            self.walk(value)

    def sequence(self, item: list[Any] | deque[Any]) -> None:
        if self.is_new(item):
            self.tuple(tuple(item))

    def set(self, item: set[Any]) -> None:
        if self.is_new(item):
            self.tuple(tuple(sorted(item, key=repr)))

    def dict(self, item: dict[Any, Any]) -> None:
        if self.is_new(item):
            self.out.append(len(item))
            for key, value in item.items():
                self.walk(key)
                self.walk(value)

    def timers(self, item: Timers) -> None:
        if self.is_new(item):
            for at, order, name in sorted((at, order, name) for at, order, name in item._heap):
                live = item._live.get(name)
                if live is not None and live[0] == order:
                    self.walk(name)
                    self.walk(at)
                    self.walk(live[1])

    def topology(self, item: TransferTopology) -> None:
        """Walk what a registration is compared with: plans follow from it, and it is far from expiry."""
        if self.is_new(item):
            facts = [(e.engine_id, e.home, e.generation, e.layouts_digest) for e in item.engines()]
            self.out.append(repr(sorted(facts)))

    def function(self, item: types.FunctionType) -> None:
        if self.is_new(item):
            self.out.append(item.__qualname__)
            for cell in item.__closure__ or ():
                self.walk(cell.cell_contents)
            self.walk(item.__defaults__)

    def method(self, item: types.MethodType) -> None:
        self.out.append(item.__func__.__qualname__)
        self.walk(item.__self__)

    def builtin(self, item: types.BuiltinMethodType) -> None:
        self.out.append(item.__name__)
        if not isinstance(item.__self__, types.ModuleType):
            self.walk(item.__self__)

    def counter(self, item: Any) -> None:
        self.out.append(repr(item))

    def object(self, item: Any) -> None:
        if not self.is_new(item):
            return
        self.out.append(type(item).__name__)
        names = getattr(type(item), "__slots__", None) or vars(item)
        for name in names:
            if name not in IGNORED:
                self.walk(getattr(item, name))

    def nothing(self, item: object) -> None:
        pass


def _choose(item: Any) -> Callable[[_Walk, Any], None]:
    if isinstance(item, Enum):
        return _Walk.enum
    if isinstance(item, msgspec.Struct):
        return _Walk.struct
    if isinstance(item, msgspec.Raw):
        return _Walk.raw
    if isinstance(item, tuple):
        return _Walk.tuple
    if isinstance(item, CACHES):
        return _Walk.nothing
    return _Walk.object


_BY_TYPE: dict[type, Callable[[_Walk, Any], None]] = {
    **dict.fromkeys((int, str, bytes, bool, type(None)), _Walk.plain),
    float: _Walk.float,
    list: _Walk.sequence,
    deque: _Walk.sequence,
    set: _Walk.set,
    frozenset: _Walk.set,
    dict: _Walk.dict,
    OrderedDict: _Walk.dict,
    Timers: _Walk.timers,
    TransferTopology: _Walk.topology,
    types.FunctionType: _Walk.function,
    types.MethodType: _Walk.method,
    types.BuiltinMethodType: _Walk.builtin,
    itertools.count: _Walk.counter,
}


def digest(item: object, now: float) -> bytes:
    """Return 16 bytes that are equal for states that cannot be told apart by what they will do."""
    walk = _Walk(now)
    walk.walk(item)
    return hashlib.blake2b(marshal.dumps(walk.out, 0), digest_size=16).digest()
