"""The commands and files that a page of the documents shows, read as a shell would read them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.support.repository import ROOT

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PROMPT = re.compile(r"^(?:\$|[\w-]+#) ")
_ASSIGNMENT = re.compile(r"^[A-Z_][A-Z_0-9]*=")
_SEPARATORS = ("|", "&&", ";")
_WRAPPERS = ("numactl", "taskset")  # their own options precede a command


class Command(NamedTuple):
    """One program with its arguments. `page` is for messages."""

    page: str
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        """Return the program's name without its directory."""
        return self.words[0].rpartition("/")[2]

    @property
    def arguments(self) -> list[str]:
        """Return what follows the program."""
        return list(self.words[1:])


def blocks_of(path: Path, language: str) -> list[str]:
    """Return the page's blocks in a language."""
    return [text for found, text in _BLOCK.findall(path.read_text()) if found == language]


@cache
def commands_of(path: Path) -> tuple[Command, ...]:
    """Return the commands of a page, those behind pipes and wrappers included."""
    page = path.relative_to(ROOT).as_posix()
    return tuple(
        Command(page, words)
        for block in blocks_of(path, "console")
        for line in _lines_of(block)
        for words in _programs_of(line)
    )


def _lines_of(block: str) -> Iterator[str]:
    """Yield the lines that have a prompt, each with its continuation. Others are output."""
    line = ""
    for part in block.splitlines():
        if not line and not _PROMPT.match(part):
            continue
        line += _PROMPT.sub("", part) if not line else "\n" + part
        if line.endswith("\\"):
            line = line[:-1]
            continue
        try:
            shlex.split(line, comments=True)
        except ValueError:  # a quotation is open
            continue
        yield line
        line = ""
    assert not line, f"a command does not end: {line}"


def _programs_of(line: str) -> Iterator[tuple[str, ...]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;>")
    lexer.whitespace_split = True
    words: list[str] = []
    is_target = False
    for word in [*lexer, ";"]:
        if is_target or word == ">":  # where the output goes
            is_target = not is_target
        elif word not in _SEPARATORS:
            words.append(word)
        elif words:
            yield from _unwrapped(words)
            words = []


def _unwrapped(words: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield a command, and the one that it wraps."""
    while words and _ASSIGNMENT.match(words[0]):
        words = words[1:]
    if not words:
        return
    yield tuple(words)
    if words[0] in _WRAPPERS:
        inner = [n for n, word in enumerate(words) if n and "/" in word and not word.startswith("-")]
        if inner:
            yield tuple(words[inner[0] :])
