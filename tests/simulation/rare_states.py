"""How often a run of the simulation meets each branch, state, edge, code and error of the product.

`start` has what is imported from then on count (`branches`); a mutant that is planted before is counted as it
is. Nothing here imports kvxferd.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

from tests.proofs.mutants.mutant import PACKAGE
from tests.simulation.branches import count_branches

RECORD = Path(__file__).parent / "met.tsv"
OFTEN = 30  # what a run on the record's seeds has met so often, the next one meets
SELDOM = 10

ROOMS = ("client", "control", "core", "daemon.py", "frame_socket.py", "mover", "plan", "wire")
# What the simulation does not run, and why: names of files, as fnmatch has them.
LEFT_OUT = {
    "*__init__.py": "names of other modules",
    "client/aio.py": "asyncio around a session",
    "client/gpu_events.py": "events of a GPU",
    "control/admin_handlers.py": "HTTP",
    "control/connection_*.py": "TCP below ZMQ",
    "control/curve_keys.py": "files of keys",
    "control/http_*.py": "HTTP",
    "control/operator_log.py": "log lines",
    "control/placement_warnings.py": "log lines",
    "control/resolver.py": "DNS",
    "control/response*.py": "HTTP",
    "mover/process/child_main.py": "a process of the operating system",
    "mover/chunks/device_scatter.py": "memory of a GPU",
    "mover/linux_process.py": "a process of the operating system",
    "mover/process/log_formatter.py": "log lines",
    "mover/reads/warmup.py": "connections of the library",
    "mover/shm.py": "files of the library",
    "mover/transport/*probe.py": "memory of a GPU",
    "mover/transport/nixl.py": "the library itself",
    "mover/ucx_settings.py": "settings of the library",
}

_T = TypeVar("_T")

_names: list[str] = []  # of the places of the modules that are loaded
_counts: list[int] = []  # of each, for which these modules hold the list


# --- what the counted code calls


def _value(number: int, value: _T) -> _T:
    _counts[number] += 1
    return value


class _MoveDict(dict[Any, Any]):
    """A table in which each move is looked up."""

    def __init__(self, moves: Mapping[Any, Any], numbers: Mapping[Any, int]) -> None:
        super().__init__(moves)
        self._numbers = numbers

    def __getitem__(self, move: Any) -> Any:
        return _value(self._numbers[move], super().__getitem__(move))

    def get(self, move: Any, default: Any = None) -> Any:
        return default if (found := super().get(move)) is None else _value(self._numbers[move], found)


class _MoveSet(frozenset[Any]):
    """A table in which each move has to be."""

    numbers: Mapping[Any, int]

    def __contains__(self, move: object) -> bool:
        return super().__contains__(move) and _value(self.numbers[move], True)


def _counted_moves(moves: Any, numbers: Mapping[Any, int]) -> _MoveDict | _MoveSet:
    if isinstance(moves, dict):
        return _MoveDict(moves, numbers)
    counted = _MoveSet(moves)
    counted.numbers = numbers
    return counted


# --- the hook


class _Loader(SourceFileLoader):
    """Compiles what another loader reads, with counters."""

    def __init__(self, reader: SourceFileLoader) -> None:
        super().__init__(reader.name, reader.path)
        self._reader = reader

    def get_data(self, path: str) -> bytes:
        return self._reader.get_data(path)

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        tree, names = count_branches(source, _files()[Path(self.path)], len(_names))
        _names.extend(names)
        _counts.extend([0] * len(names))
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_met_=_counts, _value_=_value, _moves_=_counted_moves)
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname, path=None, target: ModuleType | None = None):  # type: ignore[no-untyped-def, override]
        """Return the next finder's spec of a module, which counts where it is to."""
        if not fullname.startswith(f"{PACKAGE.name}."):
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]  # one of them may plant a mutant
        specs = (finder.find_spec(fullname, path, target) for finder in behind)
        spec: ModuleSpec | None = next(filter(None, specs), None)
        if spec is not None and Path(spec.origin or "") in _files():
            assert isinstance(spec.loader, SourceFileLoader)
            spec.loader = _Loader(spec.loader)
        return spec


def start() -> None:
    """Count from now on; a forked child begins with 0.

    Raises RuntimeError where the package is loaded already.
    """
    if PACKAGE.name in sys.modules:
        raise RuntimeError(f"cannot count: {PACKAGE.name} is loaded already")
    sys.meta_path.insert(0, _Finder())
    os.register_at_fork(after_in_child=lambda: _counts.__setitem__(slice(None), [0] * len(_counts)))


@cache
def _files() -> dict[Path, str]:
    """Return the files whose modules are counted, and their names, such as `core/sink/pulls.py`."""
    files = {path: path.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.rglob("*.py"))}
    return {path: name for path, name in files.items() if _room(name) in ROOMS and not is_left_out(name)}


def is_left_out(name: str) -> bool:
    """Whether the simulation does not run a file, such as `client/aio.py`."""
    return any(fnmatch(name, pattern) for pattern in LEFT_OUT)


def _room(place: str) -> str:
    return re.split("[/ ]", place, maxsplit=1)[0]


# --- what was met


@cache
def places() -> list[str]:
    """Return every place of the source."""
    return [name for path, file in _files().items() for name in count_branches(path.read_text(), file)[1]]


def counts() -> dict[str, int]:
    """Return how often this process has met each place that it has met."""
    return {name: count for name, count in zip(_names, _counts, strict=True) if count}


def merge(into: Counter[str], more: Mapping[str, int]) -> None:
    """Add the counts of another process."""
    into.update(more)


def read(record: Path = RECORD) -> dict[str, int]:
    """Return how often each place was met in the recorded run."""
    rows = [line.rpartition("\t") for line in record.read_text().splitlines()]
    return {place: int(count) for place, _, count in rows}


def write(met: Mapping[str, int], record: Path = RECORD) -> None:
    """Write the record anew, of a long run on fixed seeds: what `compare` looks at."""
    often = sorted((place, count) for place, count in met.items() if count >= OFTEN)
    record.write_text("".join(f"{place}\t{count}\n" for place, count in often))


def compare(record: Mapping[str, int], met: Mapping[str, int], known: Iterable[str]) -> list[str]:
    """Return what a run on the record's seeds does not meet although the record has met it often.

    known: `places()`.
    """
    lost = sorted(place for place in record if not met.get(place))
    gone = {*lost}.difference(known)
    missed = [f"not met, and {record[one]} times in the record: {one}" for one in lost if one not in gone]
    return missed + [f"gone from the source, so write the record anew: {one}" for one in sorted(gone)]


def summary(met: Mapping[str, int], known: Sequence[str]) -> str:
    """Return how often each state, edge, code and error was met, and by room the places that were met seldom.

    A state, a code or an error is met where the branch is in which it stands. known: `places()`.
    """
    words: Counter[str] = Counter()
    seldom: dict[str, list[tuple[int, str]]] = {room: [] for room in ROOMS}
    for place in known:
        _, arrow, found = place.partition(" #")[0].rpartition(" -> ")
        words.update(dict.fromkeys(found.split(", ") if arrow else (), met.get(place, 0)))
        if met.get(place, 0) < SELDOM:
            seldom[_room(place)].append((met.get(place, 0), place))
    lines = [f"{sum(place in met for place in known)} of {len(known)} places were met"]
    lines += [f"{count:9}  {word}" for word, count in sorted(words.items())]
    for room, rows in seldom.items():
        num_never = sum(not count for count, _ in rows)
        lines.append(f"{room}: {num_never} never met, {len(rows) - num_never} fewer than {SELDOM} times")
        lines += [f"{count:9}  {place}" for count, place in sorted(rows)]
    return "\n".join(lines)
