"""A mutant: a named replacement of source text that breaks one promise.

The lists are the TOML files beside this one. `old` stands exactly once in `file`, and is replaced by `new` as
the module is imported: no file of the tree is changed. Nothing here imports kvxferd, whose modules must not
be loaded before a mutant is planted.
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


class MutantError(Exception):
    """A mutant does not apply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One planted bug.

    hostile: only a peer, worker or mover that lies can make it show, so an adversary test proves it.
    unseen: why the simulation cannot notice it, although a test does; "": it must.
    """

    name: str
    file: str
    promise: str
    old: str
    new: str
    hostile: bool = False
    unseen: str = ""

    @property
    def module(self) -> str:
        """The dotted name of the module that is changed."""
        return self.file.removesuffix(".py").replace("/", ".")

    @property
    def is_for_simulation(self) -> bool:
        """Whether the simulation must notice it."""
        return not (self.hostile or self.unseen)

    def mutated_source(self) -> str:
        """Return the module's text with the bug. Raises MutantError where the old text is not unique."""
        source = (ROOT / self.file).read_text()
        found = source.count(self.old)
        if found != 1:
            raise MutantError(
                f"mutant {self.name} does not apply: its old text stands {found} times in {self.file}; "
                "change the mutant together with the code"
            )
        return source.replace(self.old, self.new)


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


@cache
def proofs() -> dict[str, str]:
    """Return the test that fails with each mutant, by its name."""
    found: dict[str, str] = tomllib.loads((HERE / "proofs" / "tests.toml").read_text())
    return found


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
