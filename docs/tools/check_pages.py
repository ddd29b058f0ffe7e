"""Print what is wrong with the documents: links, files in code spans, long lines, and the alerts' runbooks.

Exits with 1 for a fault.

    python -m docs.tools.check_pages

`reference_pages --check` does the same for pages that are stale.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from docs.tools.markdown_parts import WIDTH
from tests.support.repository import ROOT

AT_THE_ROOT = ("README.md", "CONTRIBUTING.md", "SECURITY.md")

# Of the site that `make docs` makes: a reserved name (RFC 2606), as docs/how-to/monitor.md explains.
SITE = "https://docs.kvxferd.example/"
ALERTS = "deploy/monitoring/rules/kvxferd-alerts.yml"

_FENCE = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)|<img[^>]*\ssrc=\"([^\"]+)\"")
_FILE = re.compile(r"`((?:kvxferd|tests|docs|deploy|benchmarks|examples|config)/[^`\s*{}<>]*)`")


def documents(root: Path = ROOT) -> list[Path]:
    """Return the pages of docs/ and those at the root."""
    return [*sorted((root / "docs").rglob("*.md")), *(root / name for name in AT_THE_ROOT)]


def faults(page: Path, root: Path = ROOT) -> Iterator[str]:
    """Yield what is wrong with a page, a line each."""
    name = page.relative_to(root).as_posix()
    prose = prose_of(page)
    for target in _LINK.findall(prose) + [a or b for a, b in _IMAGE.findall(prose)]:
        path, _, anchor = unquote(target).partition("#")
        other = (page.parent / path).resolve() if path else page
        if re.match(r"[a-z]+:", target):
            continue
        if not other.exists():
            yield f"{name}: {target}: there is no such file"
        elif anchor and anchor not in anchors_of(other):
            yield f"{name}: {target}: {other.relative_to(root)} has no such heading"
    yield from (
        f"{name}: `{path}`: there is no such file"
        for path in _FILE.findall(prose)
        if not (root / path).exists()
    )
    for number, line in enumerate(prose.splitlines(), 1):
        if is_wide(line):
            yield f"{name}:{number}: more than {WIDTH} columns"


def runbook_faults(rules: str, root: Path = ROOT) -> Iterator[str]:
    """Yield what is wrong with the addresses of the alerts' runbooks, a line each."""
    for url in re.findall(r"runbook_url: *(\S+)", rules):
        page, _, anchor = url.removeprefix(SITE).partition("#")
        source = root / "docs" / re.sub(r"\.html$", ".md", page)
        if not url.startswith(SITE) or not source.is_file() or anchor not in anchors_of(source):
            yield f"{ALERTS}: {url}: the site has no such section"


@cache
def prose_of(page: Path) -> str:
    """Return the page with empty lines in place of its code blocks."""
    return _FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text())


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    seen: Counter[str] = Counter()
    anchors = set()
    for heading in re.findall(r"^#+ +(.+?) *#*$", prose_of(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        text = unicodedata.normalize("NFKC", text).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        anchors.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return frozenset(anchors)


def is_wide(line: str) -> bool:
    """Whether the line is wider than it has to be: a table's, or one long word, may be."""
    if len(line) <= WIDTH or line.lstrip().startswith("|"):
        return False
    # A list's or a quote's marks, and then a link or a code span without a place to break it.
    return " " in re.sub(r"!?\[[^\]]*\]\([^)]*\)|`[^`]*`", "x", re.sub(r"^[\s>*-]*", "", line)).strip()


def main() -> int:
    """Print the faults of every document. Returns the exit status."""
    found = [fault for page in documents() for fault in faults(page)]
    found += runbook_faults((ROOT / ALERTS).read_text())
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
