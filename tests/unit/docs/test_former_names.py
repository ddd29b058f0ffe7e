"""docs/tools/check_names.py finds each kind of former name, and none in today's tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


ROOT = Path(__file__).parents[3]
CHECK = ROOT / "docs" / "tools" / "check_names.py"
LIST = """
[prose]
desk = "operator"

[core.modules]
moment = "context"

[core.classes]
Desk = "Operator"

[core.functions]
take = "acquire"

[core.constants]
LOOK_S = "POLL_S"

[root.modules]
link = "frame_socket"
"""


def offences(root: Path) -> list[str]:
    """Run the check as `make check` does, and return the lines of what it finds."""
    done = subprocess.run(
        [sys.executable, CHECK, root], capture_output=True, text=True, check=False, timeout=60
    )
    lines = done.stderr.splitlines()
    assert done.returncode == bool(lines), done
    return lines


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with a list, an empty core and no document."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "former_names.toml").write_text(LIST)
    (tmp_path / "kvxferd" / "core").mkdir(parents=True)
    return tmp_path


def test_todays_tree_has_none() -> None:
    assert offences(ROOT) == []


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("core/moment.py", "", "core/moment.py:1: `moment` is a former name in core: call it `context`"),
        ("core/moment/__init__.py", "", "core/moment/__init__.py:1: `moment` is a former name in core"),
        ("link.py", "", "link.py:1: `link` is a former name in root: call it `frame_socket`"),
        (
            "core/a.py",
            "\nclass Desk: ...\n",
            "core/a.py:2: `Desk` is a former name in core: call it `Operator`",
        ),
        ("core/a.py", "def take(): ...\n", "core/a.py:1: `take` is a former name in core: call it `acquire`"),
        ("core/a.py", "async def take(): ...\n", "core/a.py:1: `take` is a former name in core"),
        ("core/a.py", "class A:\n    def take(self): ...\n", "core/a.py:2: `take` is a former name in core"),
        ("core/a.py", "if True:\n    LOOK_S = 1\n", "core/a.py:2: `LOOK_S` is a former name in core"),
        ("core/a.py", "LOOK_S: float = 1\n", "core/a.py:1: `LOOK_S` is a former name in core"),
        (
            "mover/a.py",
            '"""One.\n\nThe desk of it.\n"""\n',
            'mover/a.py:3: "desk" is a metaphor: write operator',
        ),
        (
            "mover/a.py",
            "\nx = 1  # Desks are for it.\n",
            'mover/a.py:2: "Desks" is a metaphor: write operator',
        ),
    ],
)
def test_an_offence_is_found(tree: Path, path: str, source: str, found: str) -> None:
    file = tree / "kvxferd" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    (line,) = offences(tree)
    assert line.startswith(f"kvxferd/{found}")


@pytest.mark.parametrize("path", ["README.md", "CONTRIBUTING.md", "docs/concepts.md", "docs/how-to/busy.md"])
def test_a_metaphor_in_a_document_is_found(tree: Path, path: str) -> None:
    file = tree / path
    file.parent.mkdir(exist_ok=True)
    file.write_text("# One\n\nThe operator's desk.\n")
    assert offences(tree) == [f'{path}:3: "desk" is a metaphor: write operator']


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("mover/moment.py", "class Desk: ...\n"),  # another package's names
        ("core/a.py", "def take_all(): ...\nx.take()\n"),  # a longer name, and a call
        ("core/a.py", "class A:\n    LOOK_S: int\n"),  # a field, which may be on the wire
        ("core/a.py", 'x = "the desk"\n'),  # a text, which may be frozen
        ("core/a.py", "# desk_kind is another word, and desktop too\n"),
    ],
)
def test_what_is_no_offence(tree: Path, path: str, source: str) -> None:
    file = tree / "kvxferd" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    assert offences(tree) == []
