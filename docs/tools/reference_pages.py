"""Write the parts of docs/reference/ whose text the code already holds; --check compares them.

    python -m docs.tools.reference_pages [--check]

A generated part stands between `<!-- generated: NAME -->` and `<!-- end of generated -->`. What stands
outside is written by hand and stays. The sources: config/kvxferd.toml and `kvxferd.config` for settings,
`kvxferd.errors` for codes, click for verbs, the route table for HTTP, the connectors' tables for what they
support, and `surfaces` for metrics and log lines.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from functools import cache

import click

from docs.tools import sglang_tables, surfaces, vllm_tables
from docs.tools.markdown_parts import WIDTH, cell, filled, table
from docs.tools.sample_comments import sample_comments
from kvxferd import errors
from kvxferd.cli.root import VERBS, root
from kvxferd.config import RELOADABLE, SETTINGS, Setting, flag_name
from kvxferd.control.http_routes import ROUTES
from kvxferd.core.limits.table import SETTING, TABLE, Limit
from tests.support.repository import ROOT

COMMON_FROM = 4

REFERENCE = ROOT / "docs" / "reference"
COMMAND = ".venv/bin/python -m docs.tools.reference_pages"

_PART = re.compile(r"<!-- generated: (.+?) -->\n(.*?)<!-- end of generated -->", re.DOTALL)


def main() -> int:
    """Write the stale pages, or name them. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    check = parser.parse_args().check
    num_stale = 0
    unused = set(PARTS)
    for path in sorted(REFERENCE.glob("*.md")):
        old = path.read_text()
        unused -= {match[1] for match in _PART.finditer(old)}
        new = rewritten(old)
        if new == old:
            continue
        name = path.relative_to(ROOT).as_posix()
        num_stale += 1
        if check:
            sides = old.splitlines(), new.splitlines()
            print(*difflib.unified_diff(*sides, name, "what the code says now", lineterm="", n=1), sep="\n")
        else:
            path.write_text(new)
            print(f"wrote {name}")
    if unused:
        print(f"no page of docs/reference has the part: {', '.join(sorted(unused))}")
    if check and num_stale:
        print(f"{num_stale} page(s) of docs/reference are stale; run: {COMMAND}")
    return 1 if unused or (check and num_stale) else 0


def rewritten(page: str) -> str:
    """Return the page with every generated part made anew."""

    def part(match: re.Match[str]) -> str:
        body = "\n".join(PARTS[match[1]]())
        return f"<!-- generated: {match[1]} -->\n\n{body.strip()}\n\n<!-- end of generated -->"

    return _PART.sub(part, page)


def first_sentence(thing: object) -> str:
    """Return the first paragraph of a docstring."""
    return inspect.cleandoc(thing.__doc__ or "").partition("\n\n")[0]


# --- settings


def settings() -> Iterator[str]:
    """Yield a section for each table of the configuration, and each of its keys."""
    of_sections, of_keys = sample_comments()
    section = former = ""
    for key, setting in SETTINGS.items():
        if setting.section != section:
            section = setting.section
            yield from (f"## `[{section}]`", "")
            if section in of_sections:
                yield from (filled(of_sections[section]), "")
        yield from (f"### `{key}`", "")
        has_text_of_its_own = not former or of_keys[key] != of_keys[former]
        yield from (filled(of_keys[key]) if has_text_of_its_own else f"As `{former}`.", "")
        moment = " Takes effect on reload." if key in RELOADABLE else ""
        yield from (filled(f"Default `{default_of(setting)}`; {value_of(setting)}.{moment}"), "")
        former = key


def value_of(setting: Setting) -> str:
    """Return what a right value looks like: the title of the setting's type."""
    return next(meta.title for meta in setting.type.__metadata__ if getattr(meta, "title", None))


def default_of(setting: Setting) -> str:
    """Return the default as it is written in the file."""
    value = setting.default
    if setting.field == "mode":  # nobody reads a file mode in decimal
        return f"0o{value:o}"
    if isinstance(value, dict):
        return "{}"
    return json.dumps(list(value) if isinstance(value, tuple) else value)


# --- limits


def limits() -> Iterator[str]:
    """Yield a table of what users and peers share."""
    rows = [
        (
            f"`{row.name}`",
            _total_of(row),
            "peers" if row.is_of_peers else "users",
            *map(cell, (row.of, row.past, row.why)),
        )
        for row in TABLE.values()
    ]
    yield from table(("limit", "at most", "shared by", "of", "past it", "why"), rows)


def _total_of(row: Limit) -> str:
    if row.total == SETTING:
        return "[its setting](configuration.md#limits)"
    return f"{row.total >> 20} MiB" if row.unit == "bytes" else f"{row.total:,}"


# --- exceptions


def exceptions() -> Iterator[str]:
    """Yield a table of the exceptions that carry codes."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    rows = []
    for kind in kinds:
        default = kind.default_code.value if issubclass(kind, errors.KvxferdError) else ""
        base = kind.__base__.__name__ if kind.__base__ else ""
        rows.append((f"`{kind.__name__}`", f"`{base}`", f"`{default}`", cell(first_sentence(kind))))
    yield from table(("exception", "base", "code, where none is given", "raised when"), rows)


# --- metrics


def metrics() -> Iterator[str]:
    """Yield a table of the daemon's own metrics."""
    rows = []
    for name, family in surfaces.daemon_metrics().items():
        if not name.startswith("process_"):
            shown = f"{name}_total" if family.kind == "counter" else name
            rows.append((f"`{shown}`", family.kind, labels_of(family), cell(family.help)))
    yield from table(("metric", "type", "labels and their values", "help"), rows)


def labels_of(family: surfaces.MetricFamily) -> str:
    """Return the labels of a metric, with their values, all of which are there from the start."""
    codes = {code.value for code in errors.Code}
    shown = []
    for label, values in family.labels.items():
        if label != "le":
            names = [value for value in values if not codes.issubset(values) or value not in codes]
            names += ["each code"] * codes.issubset(values)
            shown.append(f"`{label}`" + (f": {', '.join(names)}" if names else ""))
    return "; ".join(shown)


def buckets() -> Iterator[str]:
    """Yield a table of the upper bounds of the histograms' buckets."""
    names: dict[str, list[str]] = {}
    for name, family in surfaces.daemon_metrics().items():
        if "le" in family.labels:
            bounds = sorted(float(bound) for bound in family.labels["le"] if bound != "+Inf")
            names.setdefault(", ".join(f"{bound:g}" for bound in bounds), []).append(f"`{name}`")
    rows = [(", ".join(histograms), bounds) for bounds, histograms in names.items()]
    yield from table(("histogram", "upper bounds of its buckets"), rows)


def connector_metrics() -> Iterator[str]:
    """Yield a table of the metrics that vLLM shows for the connector."""
    rows = [(f"`{name}`", cell(text)) for name, text in surfaces.connector_metrics().items()]
    yield from table(("metric", "help"), rows)


# --- log lines


def records() -> Iterator[str]:
    """Yield a table of the lines of records, one for each thing that ended."""
    yield from table(("event", "level", "fields"), rows_of(surfaces.record_lines()))


def events() -> Iterator[str]:
    """Yield a table of every other line of the daemon's."""
    known = {line.event for line in surfaces.record_lines()}
    lines = [line for line in surfaces.event_lines() if line.event not in known]
    yield from table(("event", "level", "fields"), rows_of(lines))


def rows_of(lines: list[surfaces.Line]) -> Iterator[tuple[str, str, str]]:
    """Yield a row for each event, with every level and field that it may have."""
    for event, same in itertools.groupby(lines, key=lambda line: line.event):
        levels: dict[str, None] = {}
        fields: dict[str, None] = {}
        for line in same:
            levels["error" if line.level == "exception" else line.level] = None
            fields |= dict.fromkeys(line.fields)
        names = [field if field == surfaces.OTHER_FIELDS else f"`{field}`" for field in fields]
        yield f"`{cell(event)}`", " or ".join(levels), ", ".join(names)


# --- HTTP


def routes() -> Iterator[str]:
    """Yield a table of the routes, with the first paragraph of the handler's docstring."""
    who = {"anyone": "anyone", "admin": "operators"}
    rows = [
        (
            route.method,
            f"`{route.path}`",
            who[route.access.value],
            "yes" if route.is_cached else "",
            cell(first_sentence(route.handler)),
        )
        for route in ROUTES
    ]
    yield from table(("method", "path", "for", "shared", "what"), rows)


# --- the command line


def common_options() -> Iterator[str]:
    """Yield a table of the options that many verbs have."""
    yield from table(("option", "what"), ((f"`{spelling}`", cell(text)) for spelling, text in common()))


def verbs() -> Iterator[str]:
    """Yield each verb's `--help` without the common options, and without the settings of `serve`."""
    flags = {flag_name(key) for key in SETTINGS}
    for name, command in commands():
        own = copy(command)
        own.add_help_option = False
        shown = [param for param in command.params if not flags & set(param.opts)]
        own.params = [param for param in shown if record_of(param) not in common()]
        context = click.Context(
            own, info_name=f"kvxferd {name}", terminal_width=WIDTH, max_content_width=WIDTH
        )
        lines = [line.rstrip() for line in own.get_help(context).splitlines()]
        if names := [param.opts[0] for param in shown if param not in own.params]:
            lines += ["", f"Common options: {', '.join(names)}"]
        yield from (f"## `kvxferd {name}`", "", "```text", *lines, "```", "")


@cache
def commands() -> list[tuple[str, click.Command]]:
    """Return each verb, and each verb of a group, with its name."""
    found: list[tuple[str, click.Command]] = []
    for name in VERBS:
        command = root.get_command(click.Context(root), name)
        assert command is not None
        if isinstance(command, click.Group):
            found += [(f"{name} {part}", inner) for part, inner in command.commands.items()]
        else:
            found.append((name, command))
    return found


@cache
def common() -> list[tuple[str, str]]:
    """Return spelling and help of each option that at least `COMMON_FROM` verbs have, as they spell it."""
    count = Counter(record_of(param) for _, command in commands() for param in command.params)
    return [record for record, number in count.items() if number >= COMMON_FROM and record]


def record_of(param: click.Parameter) -> tuple[str, str] | None:
    """Return spelling and help of an option; None for an argument."""
    record = param.get_help_record(click.Context(root))
    return record and (record[0], record[1])


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "settings": settings,
    "limits": limits,
    "exceptions": exceptions,
    "metrics": metrics,
    "buckets": buckets,
    "connector metrics": connector_metrics,
    "records": records,
    "events": events,
    "routes": routes,
    "common options": common_options,
    "verbs": verbs,
    "vllm versions": vllm_tables.vllm_versions,
    "vllm tests": vllm_tables.vllm_tests,
    "vllm caches": vllm_tables.vllm_caches,
    "vllm backends": vllm_tables.vllm_backends,
    "vllm quantisation": vllm_tables.vllm_quantisation,
    "vllm parallelism": vllm_tables.vllm_parallelism,
    "sglang pools": sglang_tables.sglang_pools,
    "sglang versions": sglang_tables.sglang_versions,
}

if __name__ == "__main__":
    sys.exit(main())
