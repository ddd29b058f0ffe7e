"""Finds every problem of a configuration file at once, each with its line where that can be found.

The daemon names all of them too (`loading`), of the environment and of flags as well, and no lines.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

from kvxferd.config.loading import SETTINGS, ReadSettings, read_file, read_settings
from kvxferd.errors import ConfigError

# Lines are found by parsing every beginning of the file: quadratic, and 0.2 s for one of 200 lines.
MAX_LINES_TO_LOCATE = 1000
_TOML_POSITION = re.compile(r"\(at line (\d+), column \d+\)")
_KEY = re.compile(r"\b[a-z]+\.[a-z_]+\b")


class ConfigProblem(NamedTuple):
    """One reason for which the daemon would refuse the file."""

    key: str  # "transfer.lease_s", the name of a table, or "": the whole file
    line: int  # the first line of the key, from 1; 0: not found
    message: str  # "cannot use KEY ...: why; do Y"


def find_problems(path: Path) -> list[ConfigProblem]:
    """Return all problems of the file alone, in its order. Raises ConfigError if it cannot be read.

    Contradictions between settings are looked for once each value by itself is valid, and one is returned.
    """
    read = read_settings(path, {}, {})
    found = read.problems or _contradiction(read)
    if not found:
        return []
    lines = _lines_of_keys(read_file(path))
    problems = [
        ConfigProblem(key, lines.get(key, 0) if key else _line_in(message), message) for key, message in found
    ]
    return sorted(problems, key=lambda problem: problem.line)


def _line_in(message: str) -> int:
    """Return the line that an error of the TOML parser names; 0: none."""
    position = _TOML_POSITION.search(message)
    return int(position[1]) if position else 0


def _contradiction(read: ReadSettings) -> list[tuple[str, str]]:
    """Return the first setting that contradicts another, with the sentence."""
    try:
        read.config()
    except ConfigError as error:
        named = [key for key in _KEY.findall(error.message) if key in SETTINGS]
        given = [key for key in named if key in read.sources]
        return [((given or named or [""])[0], error.message)]
    return []


def _lines_of_keys(text: str) -> dict[str, int]:
    """Return the first line of each table and key; {} for a text that is too long to look.

    A key's line is behind the last beginning of the text that is TOML without it.
    """
    lines = text.split("\n")  # not `splitlines`, which ends lines where TOML does not
    if len(lines) > MAX_LINES_TO_LOCATE:
        return {}
    found: dict[str, int] = {}
    start = 1  # of what the next beginning that is TOML adds
    for number in range(1, len(lines) + 1):
        try:
            document = tomllib.loads("\n".join(lines[:number]) + "\n")
        except tomllib.TOMLDecodeError:
            continue
        for section, table in document.items():
            found.setdefault(section, start)
            for field in table if isinstance(table, dict) else ():
                found.setdefault(f"{section}.{field}", start)
        start = number + 1
    return found
