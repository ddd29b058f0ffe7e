"""A mutant: a named replacement of source text that breaks one promise.

The lists are the TOML files beside this one. `old` stands exactly once in the package, in whichever file, and
is replaced by `new` as its module is imported: no file of the tree is changed. A mutant whose text is gone,
or stands twice, is stale: it is written anew for the code that keeps the promise now, or removed with the
promise. Nothing here imports kvxferd, whose modules must not be loaded before a mutant is planted.
"""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PACKAGE = ROOT / "kvxferd"


class MutantError(Exception):
    """A mutant does not apply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One planted bug.

    hostile: only a peer, worker or mover that lies can make it show, so an adversary test proves it.
    unseen: why the simulation cannot notice it, although a test does; "": it must.
    """

    name: str
    promise: str
    old: str
    new: str
    hostile: bool = False
    unseen: str = ""

    @property
    def path(self) -> Path:
        """The file that is changed. Raises MutantError where the mutant is stale."""
        found = _places_of(self.old)
        if len(found) != 1:
            names = ", ".join(str(path.relative_to(PACKAGE)) for path in found[:3])
            where = f"kvxferd: {names}" if names else "kvxferd"
            raise MutantError(f"mutant {self.name} is stale: its text stands {len(found)} times in {where}")
        return found[0]

    @property
    def module(self) -> str:
        """The dotted name of the module that is changed."""
        return ".".join(self.path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")

    @property
    def is_for_simulation(self) -> bool:
        """Whether the simulation must notice it."""
        return not (self.hostile or self.unseen)

    def mutated_source(self) -> str:
        """Return the module's text with the bug. Raises MutantError where the mutant is stale."""
        return self.path.read_text().replace(self.old, self.new)


@cache
def _places_of(old: str) -> list[Path]:
    """Return the file of each place of a text in the package."""
    return [path for path, text in sources().items() for _ in range(text.count(old))]


@cache
def sources() -> dict[Path, str]:
    """Return the text of each file of the package."""
    return {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def all_mutants() -> dict[str, Mutant]:
    """Return every mutant by its name. Raises MutantError where two have one name."""
    mutants: dict[str, Mutant] = {}
    for path in sorted(HERE.glob("*.toml")):
        for entry in tomllib.loads(path.read_text()).get("mutant", ()):
            mutant = Mutant(**entry)
            if mutant.name in mutants:
                raise MutantError(f"two mutants are named {mutant.name}")
            mutants[mutant.name] = mutant
    return mutants


def stale() -> dict[str, str]:
    """Return why each mutant that cannot be planted cannot, by its name."""
    found = {}
    for mutant in all_mutants().values():
        try:
            compile(mutant.mutated_source(), mutant.path, "exec")
        except (MutantError, SyntaxError) as error:
            found[mutant.name] = str(error)
    return found


@cache
def proofs() -> dict[str, str]:
    """Return the test that fails with each mutant, by its name."""
    found: dict[str, str] = tomllib.loads((HERE / "proofs" / "tests.toml").read_text())
    return found


def unproved() -> list[str]:
    """Return the mutants that the simulation cannot notice, and whose test is gone or was never named."""
    return [name for name, one in all_mutants().items() if not one.is_for_simulation and not _is_proved(name)]


def _is_proved(name: str) -> bool:
    path, _, function = proofs().get(name, "").partition("[")[0].rpartition("::")
    test = ROOT / path.partition("::")[0]
    return test.is_file() and f"def {function}(" in test.read_text()


class _MutatingLoader(SourceFileLoader):
    """Compiles the changed text. Bytecode that is kept on disk is neither read nor written."""

    def __init__(self, mutant: Mutant, fullname: str, path: str) -> None:
        super().__init__(fullname, path)
        self._text = mutant.mutated_source()

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._text, self.path, "exec", dont_inherit=True)

    def get_data(self, path: str) -> bytes:
        return self._text.encode() if path == self.path else super().get_data(path)


class _MutatingFinder(PathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, fullname, path=None, target: ModuleType | None = None):  # type: ignore[no-untyped-def, override]
        """Return the spec of the mutant's module, None for any other."""
        if fullname != self._mutant.module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            assert spec.origin is not None
            spec.loader = _MutatingLoader(self._mutant, fullname, spec.origin)
        return spec


def plant(mutant: Mutant) -> None:
    """Have this process import the mutant. Raises MutantError where its module is loaded already."""
    if mutant.module in sys.modules:
        raise MutantError(f"cannot plant {mutant.name}: {mutant.module} is loaded already")
    sys.meta_path.insert(0, _MutatingFinder(mutant))
