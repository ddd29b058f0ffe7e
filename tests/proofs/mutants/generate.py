"""Mutants that are made from the source as it is: the careless refactorings of a stranger.

A planted bug breaks a promise that its author had in mind; these show what nobody thought of. Each has a name
such as `core/sink/pulls.py:123 stale`: the file, the line, and which operator of `sites` has changed it. It
is a `Mutant` whose text is the whole module, so it is planted and judged as any other.
"""

from __future__ import annotations

import difflib
import random
import re
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from itertools import islice
from pathlib import Path

from tests.proofs.mutants.mutant import PACKAGE, Mutant, MutantError, sources
from tests.proofs.mutants.sites import Module, Site

ROOMS = ("core", "client", "mover", "control", "plan", "wire")
MAX_PER_FILE = 3

# What no mutant is made of, by the reason: names of files, as fnmatch has them.
EXCLUDED = {
    "names of other modules": "*__init__",
    "asyncio, or threads, around a session": "client/aio client/blocking",
    "memory and events of a GPU": "client/gpu_events mover/chunks/device_scatter mover/transport/*probe",
    "the transfer library, its settings and its files": (
        "mover/transport/nixl mover/backends mover/disconnects mover/reads/warmup mover/shm"
        " mover/ucx_settings"
    ),
    "processes and limits of the operating system": (
        "mover/process/child_main mover/process/forkserver mover/linux_process control/fd_budget"
    ),
    "HTTP": "control/http_* control/admin_handlers control/response* control/status_page",
    "TCP and authentication below ZMQ": (
        "control/connection_* control/curve_keys control/peer_admission control/resolver control/zap"
    ),
    "what an operator writes and reads": (
        "control/allowed_keys_file control/node_admin control/operator_log control/placement_warnings"
        " mover/process/log_formatter core/sink/deadline_reasons plan/differences"
    ),
    "telemetry": "core/sink/pull_records core/views/* wire/traceparent",
}

_ENUM = re.compile(r"^class (\w+)\((?:Str|Int)?Enum\):\n((?:(?:    .*)?\n)*)", re.MULTILINE)
_MEMBER = re.compile(r"^    ([A-Z][A-Z0-9_]*) = ", re.MULTILINE)


def generate(count: int, seed: int) -> list[Mutant]:
    """Return the first mutants of a seed. Raises MutantError where there are fewer."""
    found = list(islice(draw(seed), count))
    if len(found) < count:
        raise MutantError(f"cannot draw {count} mutants: there are {len(found)}, {MAX_PER_FILE} of a file")
    return found


def draw(seed: int) -> Iterator[Mutant]:
    """Yield mutants, the same for one seed and one source.

    Each time a file is drawn by its number of sites, then one of its operators, then a site of that.
    """
    rng = random.Random(seed)
    left = {path: dict(found) for path in files() if (found := _sites(path))}
    num_drawn: Counter[Path] = Counter()
    while left:
        (path,) = rng.choices(list(left), [len(found) for found in left.values()])
        found = left[path]
        operator = rng.choice(sorted({site.operator for site in found.values()}))
        name = rng.choice([name for name, site in found.items() if site.operator == operator])
        yield _mutant(path, name, found.pop(name))
        num_drawn[path] += 1
        if num_drawn[path] == MAX_PER_FILE or not found:
            del left[path]


def named(name: str) -> Mutant:
    """Return the mutant of this name. Raises MutantError where there is none."""
    path = PACKAGE / name.partition(":")[0]
    if path not in files() or name not in _sites(path):
        raise MutantError(f"no mutant has the name {name!r}")
    return _mutant(path, name, _sites(path)[name])


def operator_of(mutant: Mutant) -> str:
    """Return which operator has made the mutant."""
    return mutant.name.split()[1]


def diff_of(mutant: Mutant) -> str:
    """Return what the mutant changes, as a unified diff."""
    old, new = mutant.old.splitlines(keepends=True), mutant.new.splitlines(keepends=True)
    file = mutant.path.relative_to(PACKAGE.parent).as_posix()
    return "".join(difflib.unified_diff(old, new, file, mutant.name))


def files() -> list[Path]:
    """Return the files that mutants are made of."""
    names = {path: path.relative_to(PACKAGE).as_posix() for path in sources()}
    return [path for path, name in names.items() if name.partition("/")[0] in ROOMS and not is_excluded(name)]


def is_excluded(file: str) -> bool:
    """Whether no mutant is made of a file, such as `core/sink/pulls.py`."""
    patterns = " ".join(EXCLUDED.values()).split()
    return any(fnmatch(file, f"{pattern}.py") for pattern in patterns)


def _mutant(path: Path, name: str, site: Site) -> Mutant:
    old = sources()[path]
    return Mutant(name=name, promise="", old=old, new=changed(old, site))


def changed(source: str, site: Site) -> str:
    """Return the source with the site's text replaced."""
    text = source.encode()
    return (text[: site.start] + site.new + text[site.end :]).decode()


@cache
def _sites(path: Path) -> dict[str, Site]:
    """Return the sites of a file by their names: where a line has more of one operator they have numbers."""
    file, numbers = path.relative_to(PACKAGE).as_posix(), Counter()
    found = {}
    for site in Module(sources()[path], _enums()).sites:
        name = f"{file}:{site.line} {site.operator}"
        numbers[name] += 1
        found[name if numbers[name] == 1 else f"{name} {numbers[name]}"] = site
    return found


@cache
def _enums() -> dict[str, list[str]]:
    """Return the members of each enum of the package."""
    bodies = [match.groups() for source in sources().values() for match in _ENUM.finditer(source)]
    return {name: members for name, body in bodies if len(members := _MEMBER.findall(body)) > 1}
