"""The documents: links lead somewhere, lines wrap, and pages that are made from the code are not stale."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[3]
WIDTH = 100
PAGES = sorted((ROOT / "docs").rglob("*.md"))
AT_THE_ROOT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
DOCUMENTS = [*PAGES, *(path for path in AT_THE_ROOT if path.exists())]

_FENCE = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)|<img[^>]*\ssrc=\"([^\"]+)\"")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def prose_of(path: Path) -> str:
    """Return the page with empty lines in place of its code blocks."""
    return _FENCE.sub(lambda match: "\n" * match[0].count("\n"), path.read_text())


@cache
def anchors_of(path: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    seen: Counter[str] = Counter()
    anchors = set()
    for heading in re.findall(r"^#+ +(.+?) *#*$", prose_of(path), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        text = unicodedata.normalize("NFKC", text).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        anchors.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return frozenset(anchors)


def broken_links(path: Path) -> Iterator[str]:
    text = prose_of(path)
    targets = _LINK.findall(text) + [a or b for a, b in _IMAGE.findall(text)]
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = unquote(target).partition("#")
        other = (path.parent / name).resolve() if name else path
        if not other.exists():
            yield f"{name_of(path)}: {target}: there is no such file"
        elif anchor and anchor not in anchors_of(other):
            yield f"{name_of(path)}: {target}: {name_of(other)} has no such heading"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    assert list(broken_links(path)) == []


def test_a_broken_link_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# A `page.md`, twice\n\n[a](#a-pagemd-twice) [b](#b) [c](none.md)\n\n```\n[d](#d)\n```\n"
        "![e](e.svg) [f](https://example.org/f.md)\n"
    )
    assert list(broken_links(page)) == [
        "page.md: #b: page.md has no such heading",
        "page.md: none.md: there is no such file",
        "page.md: e.svg: there is no such file",
    ]


def is_wide(line: str) -> bool:
    """Whether the line is wider than it has to be: a table's, or one long word, may be."""
    if len(line) <= WIDTH or line.lstrip().startswith("|"):
        return False
    # A list's or a quote's marks, and then a link or a code span without a place to break it.
    return " " in re.sub(r"!?\[[^\]]*\]\([^)]*\)|`[^`]*`", "x", re.sub(r"^[\s>*-]*", "", line)).strip()


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_lines_wrap(path: Path) -> None:
    wide = [number for number, line in enumerate(prose_of(path).splitlines(), 1) if is_wide(line)]
    assert not wide, f"{name_of(path)}: more than {WIDTH} columns in lines {wide}"


@pytest.mark.process
def test_pages_made_from_the_code_are_not_stale() -> None:
    """The script's own output names the pages, both sides and the command to run."""
    script = ROOT / "docs" / "tools" / "reference_pages.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("page", "found"),
    [
        ('<script src="assets/a.js"></script><a href="https://example.org">x</a>', 0),
        ('<script src="https://example.org/a.js"></script>', 1),
        ('<link rel="stylesheet" href="//example.org/a.css">', 1),
        ('<img alt="" src="http://example.org/a.png">', 1),
        ("<style>@import 'https://example.org/a.css'; b { background: url(//example.org/c) }</style>", 2),
        ('<pre class="mermaid">graph</pre>', 1),  # for this the theme loads a script
    ],
)
def test_what_the_site_loads_from_outside_is_found(tmp_path: Path, page: str, found: int) -> None:
    (tmp_path / "index.html").write_text(page)
    (tmp_path / "a.js").write_text(
        "/* https://example.org/licence */" + "load('https://unpkg.com/a')" * found
    )
    found *= 2
    check = ROOT / "docs" / "tools" / "check_site.py"
    done = subprocess.run(
        [sys.executable, str(check), str(tmp_path)], capture_output=True, text=True, check=False, timeout=100
    )
    assert len(done.stdout.splitlines()) == found + 1
    assert done.returncode == (1 if found else 0)


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", "docs/architecture.md"])
def test_paths_in_code_spans_are_there(name: str) -> None:
    """Files and folders of this repository, as a reader of the page would open them."""
    spans = re.findall(r"`([^`\s]+)`", prose_of(ROOT / name))
    paths = [
        span for span in spans if re.match(r"(kvxferd|tests|docs|deploy|benchmarks|examples|config)/", span)
    ]
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_names_in_the_table_of_where_to_look_are_in_its_files() -> None:
    table = (
        (ROOT / "docs" / "architecture.md")
        .read_text()
        .partition("| question | file |")[2]
        .partition("\n\n")[0]
    )
    missing = []
    for row in table.splitlines()[2:]:
        spans = re.findall(r"`([^`]+)`", row)
        text = "".join((ROOT / span).read_text() for span in spans if "/" in span)
        missing += [span for span in spans if "/" not in span and not re.search(rf"\b{span}\b", text)]
    assert table
    assert missing == []


# Pages for operators: what they name has to be there.
GUIDES = [
    *(path for path in DOCUMENTS if path.parent.name in ("how-to", "tutorial")),
    *(
        ROOT / name
        for name in ("README.md", "SECURITY.md", "docs/architecture.md", "docs/reference/limits.md")
    ),
]


def recorded(name: str) -> dict[str, Any]:
    """Return a surface as `tests/frozen` has recorded it."""
    return json.loads((ROOT / "tests" / "frozen" / "recorded" / f"{name}.json").read_text())


@pytest.mark.parametrize("path", GUIDES, ids=name_of)
def test_settings_and_metrics_of_a_guide_are_there(path: Path) -> None:
    sections = "node|worker|control|http|peer|transfer|mover|drain|limits|log"
    text = path.read_text()
    settings = set(re.findall(rf"`((?:{sections})\.\w+)`", text)) - {"worker.sock", "control.sock"}
    assert settings <= set(recorded("settings")["keys"])
    metrics = recorded("metrics")
    there = {series for one in metrics["daemon"].values() for series in one["series"]} | set(
        metrics["daemon"]
    )
    there |= {name.removeprefix("vllm:") for name in metrics["connector"]}
    named = set(re.findall(r"`(?:vllm:)?(kvxferd_\w+)`", text))
    assert named <= there


def test_events_and_codes_of_the_guides_are_there() -> None:
    lines = recorded("log_lines")
    events = {*lines["events"], *(name.partition(",")[0] for name in lines["records"])}
    assert named_in_first_column("monitoring.md", "| event | meaning |") <= events
    codes = set(recorded("codes")["codes"])
    assert named_in_first_column("troubleshoot.md", "| code of a failed pull |") <= codes


def named_in_first_column(guide: str, head: str) -> set[str]:
    """Return the code spans in the first cells of the table with that head."""
    table = (ROOT / "docs" / "how-to" / guide).read_text().partition(head)[2].partition("\n\n")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    assert cells
    return {name for cell in cells for name in re.findall("`(.+?)`", cell)}
