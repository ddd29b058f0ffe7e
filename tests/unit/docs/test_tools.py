"""The tools of the documents find what they look for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from docs.tools import reference_pages, surfaces
from docs.tools.check_pages import SITE, faults, runbook_faults
from tests.support.repository import ROOT


def test_each_fault_of_a_page_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `page.md`, twice\n\n[a](#a-pagemd-twice) [b](#b) [c](none.md)\n\n```\n[d](#d)\n```\n"
        "![e](e.svg) [f](https://example.org/f.md)\n"
        "`tests/no_such_test.py`\n" + "word " * 21 + "\n" + "| a table may be wide |" * 5 + "\n"
    )
    assert list(faults(page, tmp_path)) == [
        "page.md: #b: page.md has no such heading",
        "page.md: none.md: there is no such file",
        "page.md: e.svg: there is no such file",
        "page.md: `tests/no_such_test.py`: there is no such file",
        "page.md:10: more than 100 columns",
    ]


def test_a_runbook_that_is_not_there_is_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("# A page\n\n## KvxferdDown\n")
    good = f"{SITE}page.html#kvxferddown"
    wrong = [
        f"{SITE}page.html",
        f"{SITE}page.html#up",
        f"{SITE}none.html#kvxferddown",
        "docs/page.md#kvxferddown",
    ]
    rules = "\n".join(f"  runbook_url: {url}" for url in (good, *wrong))
    assert [fault.split(": ")[1] for fault in runbook_faults(rules, tmp_path)] == wrong


def test_a_stale_part_is_made_anew() -> None:
    page = (reference_pages.REFERENCE / "codes.md").read_text()
    stale = page.replace("| `BusyError` |", "| `BusierError` |")
    assert stale != page
    assert reference_pages.rewritten(stale) == page


def test_lines_that_are_logged_are_found() -> None:
    lines = {(line.event, line.level): line.fields for line in surfaces.event_lines()}
    assert lines["drain limit reached", "warning"] == ("pulls", "transfers")
    records = {(line.event, line.level): line.fields for line in surfaces.record_lines()}
    assert {"code", "failed_phase"} <= set(records["pull", "warning"]) - set(records["pull", "info"])


def test_what_the_site_loads_from_outside_is_found(tmp_path: Path) -> None:
    check = [sys.executable, str(ROOT / "docs" / "tools" / "check_site.py"), str(tmp_path)]
    inside = '<script src="assets/a.js"></script><a href="https://example.org">x</a>'
    (tmp_path / "inside.html").write_text(inside)
    (tmp_path / "inside.js").write_text("/* https://example.org/licence */")
    assert subprocess.run(check, capture_output=True, check=False, timeout=100).returncode == 0
    outside = (
        '<script src="https://example.org/a.js"></script>',
        '<link rel="stylesheet" href="//example.org/a.css">',
        '<img alt="" src="http://example.org/a.png">',
        "<style>@import 'https://example.org/a.css'; b { background: url(//example.org/c) }</style>",
        '<pre class="mermaid">graph</pre>',  # for this the theme loads a script
    )
    (tmp_path / "outside.html").write_text("\n".join(outside))
    (tmp_path / "outside.js").write_text("load('https://unpkg.com/a')")
    done = subprocess.run(check, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 1
    # A style sheet may load two things; the last line counts them all.
    assert len(done.stdout.splitlines()) == len(outside) + 1 + 1 + 1
