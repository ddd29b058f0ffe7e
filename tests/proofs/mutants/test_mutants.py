"""A planted bug is noticed, and what cannot be planted is named."""

from __future__ import annotations

import ast
import importlib
from itertools import islice

import pytest

from tests.proofs.mutants.__main__ import first_failure
from tests.proofs.mutants.generate import changes, diff_of, draw, named
from tests.proofs.mutants.mutant import Mutant, MutantError, all_mutants, plant, proofs

NOTICED = "client-delivers-after-a-failure"


def test_each_mutant_changes_something() -> None:
    assert len(all_mutants()) >= 60
    assert [one.name for one in all_mutants().values() if one.new.strip() == one.old.strip()] == []
    assert proofs().keys() <= all_mutants().keys()


@pytest.mark.parametrize("old", ["no such text", "from __future__ import annotations"])
def test_text_that_does_not_stand_once_is_stale(old: str) -> None:
    mutant = Mutant(name="none", promise="", old=old, new="")
    with pytest.raises(MutantError, match=r"none is stale: its text stands \d+ times"):
        mutant.mutated_source()


def test_a_module_that_is_loaded_is_an_error() -> None:
    mutant = all_mutants()[NOTICED]
    importlib.import_module(mutant.module)
    with pytest.raises(MutantError, match="is loaded already"):
        plant(mutant)


def test_the_test_that_fails_with_a_planted_bug_is_named() -> None:
    assert first_failure(all_mutants()[NOTICED], proofs()[NOTICED]) == proofs()[NOTICED]


def test_a_seed_draws_the_same_mutants_each_of_which_can_be_planted() -> None:
    drawn = list(islice(draw(7), 6))
    assert [one.name for one in drawn] == [one.name for one in islice(draw(7), 6)]
    for mutant in drawn:
        assert named(mutant.name) == mutant
        assert len([line for line in diff_of(mutant).splitlines() if line[0] in "+-"]) > 2, mutant.name
        compile(mutant.mutated_source(), mutant.name, "exec")


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("self.close()", {"dropped": ["pass"]}),
        ("del held[name]", {"dropped": ["pass"]}),
        ("if late:\n    return", {"dropped": ["pass"], "missing-check": ["if not late:\n    return"]}),
        ("held.clear()\nself.n += len(held)", {
            "dropped": ["pass\nself.n += len(held)", "held.clear()\npass"],
            "moved": ["self.n += len(held)\nheld.clear()"],
        }),
        ("held.clear()\nself.n += 1", {"dropped": ["pass\nself.n += 1", "held.clear()\npass"]}),
        ("x = a < b", {"boundary": ["x = a <= b"]}),
        ("x = a and b", {"missing-check": ["x = b", "x = a"]}),
        ("log.info(1)", {}),
        ("assert a and b", {}),
        ("def check_integrity():\n    look(1)", {}),
    ],
)  # fmt: skip
def test_what_is_made_of_a_text(body: str, want: dict[str, list[str]]) -> None:
    found: dict[str, list[str]] = {}
    for number in range(len(list(changes(ast.parse(body))))):
        tree = ast.parse(body)
        change = list(changes(tree))[number]
        change.make()
        found.setdefault(change.operator, []).append(ast.unparse(tree))
    assert found == want
