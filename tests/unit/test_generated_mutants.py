"""Generated mutants: what each operator makes of a text, and what a seed draws of the package."""

from __future__ import annotations

import ast
from collections import Counter
from fnmatch import fnmatch
from textwrap import dedent, indent

import pytest

from tests.proofs.mutants.generate import EXCLUDED, MAX_PER_FILE, changed, generate, is_excluded, named
from tests.proofs.mutants.mutant import PACKAGE, MutantError, sources
from tests.proofs.mutants.sites import Module
from tests.proofs.mutants.verdicts import Row, report

HEAD = """\
class Lease:
    def __init__(self, start: float, stop: float) -> None:
        self.start = start
        self.stop = stop

    def method(self, now: float, end: float, name: str, phase: Phase):
"""
MEMBERS = {"Phase": ["WAITING", "POSTED", "FAILED"]}


def mutants_of(body: str, operator: str | None = None) -> list[str]:
    """Return the bodies that an operator, or each, makes of a method's body."""
    source = HEAD + indent(body, " " * 8)
    sites = [site for site in Module(source, MEMBERS).sites if operator in (None, site.operator)]
    sites = [site for site in sites if site.start >= len(HEAD)]
    return [dedent(changed(source, site).removeprefix(HEAD)) for site in sites]


@pytest.mark.parametrize(
    ("operator", "body", "want"),
    [
        ("dropped", "self.close()", ["pass"]),
        ("dropped", "await self.close()", ["pass"]),
        ("dropped", "del held[name]", ["pass"]),
        ("dropped", "if late:\n    return", ["pass"]),
        ("dropped", "if late:\n    raise Late", ["pass"]),
        ("dropped", "if late:\n    return\nelse:\n    x = 1", []),  # no early exit: its check is the target
        ("dropped", "try:\n    x = 1\nfinally:\n    os.close(fd)", ["try:\n    x = 1\nfinally:\n    pass"]),
        ("moved", "held.clear()\nself.end()  # now", ["self.end()\nheld.clear()  # now"]),
        ("moved", "x = a\ny = b", []),  # in either order the same
        ("moved", "x = self.a()\nself.b(x)", []),  # the other order cannot run
        ("moved", "self.x = 1\nreturn", []),
        ("moved", "self.x = now\ny = self.x", ["y = self.x\nself.x = now"]),
        ("wrong-variable", "return now", ["return end"]),
        ("wrong-variable", "return name", []),  # no other has its type
        ("wrong-variable", "return self.start", ["return self.stop"]),
        ("wrong-variable", "own_id, peer_id = a\nreturn own_id", ["own_id, peer_id = a\nreturn peer_id"]),
        ("missing-check", "return a and b", ["return b", "return a"]),
        ("missing-check", "return a or (b and c)",
         ["return (b and c)", "return a", "return a or (c)", "return a or (b)"]),
        ("missing-check", "if a:\n    x = 1", ["if True:\n    x = 1", "if False:\n    x = 1"]),
        ("missing-check", "return not (a or b)", ["return (a or b)", "return not (b)", "return not (a)"]),
        ("missing-check", "return a not in b", ["return a in b"]),
        ("boundary", "return 0 <= a < b", ["return 0 < a < b", "return 0 <= a <= b"]),
        ("boundary", "return (a + 1) * (b - 1)", ["return (a) * (b - 1)", "return (a + 1) * (b)"]),
        ("boundary", "return min(a, b)", ["return max(a, b)"]),
        ("boundary", "return a[0] + a[-1]", ["return a[-1] + a[-1]", "return a[0] + a[0]"]),
        ("lost-update", "lease.stop = end", ["pass"]),
        ("lost-update", "lease.stop += end", ["pass"]),
        ("lost-update", "held[name] = end", ["pass"]),
        ("lost-update", "held.pop(name, None)", ["pass"]),
        ("lost-update", "x = held.pop(name)", []),  # x would be missing
        ("stale", "if a:\n    self.stop = end\nreturn self.stop",
         ["earlier = self.stop\nif a:\n    self.stop = end\nreturn earlier"]),
        ("stale", "lease = find()\nreturn lease.stop", []),
        ("wrong-member", "return phase is Phase.WAITING", ["return phase is Phase.POSTED"]),
        ("wrong-member", "return Phase.FAILED", ["return Phase.WAITING"]),
    ],
)  # fmt: skip
def test_operator(operator: str, body: str, want: list[str]) -> None:
    assert mutants_of(body, operator) == want


@pytest.mark.parametrize(
    "body",
    [
        '"""A docstring, if a < b."""',
        "_LOG.warning('late by %s', now + 1)",
        "assert now < end and held",
        "raise Late(f'{now + 1} is after {end}')",
        "if TYPE_CHECKING:\n    from kvxferd import x",
        "self.phases_s[name] = now - end",
        "return\nx: Phase",
    ],
)
def test_what_decides_nothing_is_left_alone(body: str) -> None:
    assert mutants_of(body) == []


def test_characters_of_many_bytes_stay_whole() -> None:
    assert mutants_of("return 'ä', min(a, 'ß')", "boundary") == ["return 'ä', max(a, 'ß')"]


def test_each_exclusion_is_of_a_file() -> None:
    names = [path.relative_to(PACKAGE).as_posix() for path in sources()]
    patterns = [f"{pattern}.py" for pattern in " ".join(EXCLUDED.values()).split()]
    assert [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in names)] == []


@pytest.mark.slow
def test_mutants_of_the_package_are_other_programs_that_a_seed_draws() -> None:
    drawn = generate(300, 7)
    assert drawn == generate(300, 7)
    assert drawn[:100] != generate(100, 8)
    assert len({mutant.name for mutant in drawn}) == len(drawn)
    assert max(Counter(mutant.path for mutant in drawn).values()) <= MAX_PER_FILE
    assert not any(is_excluded(mutant.name.partition(":")[0]) for mutant in drawn)
    before = {path: ast.dump(ast.parse(sources()[path])) for path in {mutant.path for mutant in drawn}}
    for mutant in drawn:
        assert (
            ast.dump(compile(mutant.mutated_source(), mutant.name, "exec", ast.PyCF_ONLY_AST))
            != before[mutant.path]
        )
        assert named(mutant.name) == mutant


def test_a_name_of_no_mutant_is_an_error() -> None:
    for name in ("core/sink/pulls.py:1 boundary", "core/__init__.py:1 dropped", "nowhere"):
        with pytest.raises(MutantError, match="no mutant has the name"):
            named(name)


def test_the_report_counts_by_operator_and_shows_what_the_simulation_has_missed() -> None:
    rows = [
        Row("a.py:1 moved", "moved", "simulation", "caught after 7 faults", 7),
        Row("a.py:2 moved", "moved", "nothing", "missed: 600 faults; no test", diff="-x\n+y\n"),
        Row("b.py:3 stale", "stale", "tests", "missed: 600 faults; test_b", diff="-v\n+w\n"),
        Row("b.py:4 stale", "stale", "does not start", "NameError: z"),
    ]
    text = "\n".join(report(rows))
    table = [line.split() for line in text.splitlines()]
    assert ["moved", "1", "(50.0", "%)", "0", "(0.0", "%)", "1", "(50.0", "%)"] in table
    assert ["all", *3 * ["1", "(33.3", "%)"]] in table
    assert "not counted: b.py:4 stale: NameError: z" in text
    assert text.endswith("b.py:3 stale: noticed by tests: missed: 600 faults; test_b\n-v\n+w")
