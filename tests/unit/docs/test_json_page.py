"""docs/reference/json.md has the shape of every verb's `--json`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import click

from kvxferd.cli.root import root
from kvxferd.tooling.output import JSON_VERSION
from tests.frozen.tree import ROOT
from tests.support.verb_harness import run

PAGE = ROOT / "docs" / "reference" / "json.md"


def _verbs_with_json(group: click.Group, prefix: str = "") -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _verbs_with_json(command, f"{prefix}{name} ")
        elif command is not None and any("--json" in param.opts for param in command.params):
            yield prefix + name


def test_every_verb_with_json_is_there() -> None:
    """Another verb is run by tests/frozen/command_line.py, of which docs/tools/reference_pages.py is made."""
    described = set(re.findall(r"^## `kvxferd (.+)`$", PAGE.read_text(), re.MULTILINE))
    assert described == set(_verbs_with_json(root))


async def test_the_version_is_the_first_key() -> None:
    printed = json.loads((await run("explain", "tiny-dense", "tiny-dense", "--json")).stdout)
    assert next(iter(printed.items())) == ("json_version", JSON_VERSION)
