"""The tools of the documents find what they look for."""

from __future__ import annotations

from pathlib import Path

from docs.tools.check_pages import SITE, faults, runbook_faults


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
