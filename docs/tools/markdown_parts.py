"""Parts of a page in Markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator

WIDTH = 100


def filled(text: str) -> str:
    """Return a paragraph of lines of at most `WIDTH` columns."""
    return textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def cell(text: str) -> str:
    """Return text as a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    head = list(head)
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield re.sub(r"\|  +\|", "| |", f"| {' | '.join(row)} |")
