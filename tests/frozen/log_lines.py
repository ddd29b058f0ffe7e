"""Every line that the package logs: event, level and fields, found in its syntax trees.

Operators search for events and filter by fields. What a line's fields are called is in the call itself;
`**` stands for fields that are computed. The lines of records are logged here, and their fields kept.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, get_args

import structlog
from msgspec import inspect as types

from kvxferd.core.snapshot import Record
from kvxferd.errors import Code
from kvxferd.telemetry.logs import log_record
from tests.frozen.shapes import example_of, sorted_map
from tests.frozen.tree import files_in, parsed, text_of
from tests.support.node_samples import pull_record, records

LEVELS = ("debug", "info", "warning", "error", "exception", "critical")
COMPUTED = "(computed)"
_LOGS = re.compile(r"(?i)(\b|_)(log|logger)\b|structlog|getLogger|init_logger")
_STANDARD = re.compile(r"(getLogger|init_logger)\(")
_NOT_LOGGED = {"limit_by", "exc_info"}


class Line(NamedTuple):
    """One call that logs."""

    event: str
    level: str
    fields: tuple[str, ...]


def surface() -> dict[str, Any]:
    """Return the events of structlog, the sentences of the standard library's loggers, and records' lines."""
    events: dict[str, set[tuple[str, ...]]] = {}
    sentences: set[str] = set()
    loggers: set[str] = set()
    for path in files_in("kvxferd"):
        text = text_of(path)
        if path.suffix != ".py" or not _LOGS.search(text):
            continue
        calls = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
        loggers |= set(_logger_names(calls))
        for line in _lines(calls):
            if "import structlog" in text or not _STANDARD.search(text):
                events.setdefault(line.event, set()).add((line.level, *line.fields))
            else:
                sentences.add(f"{line.level}: {line.event}")
    return {
        "events": {
            event: [{"level": level, "fields": list(fields)} for level, *fields in sorted(calls)]
            for event, calls in sorted(events.items())
        },
        "records": _records(),
        "lines of movers and workers": sorted(sentences),
        "named loggers": sorted(loggers),
    }


def _lines(calls: Iterable[ast.Call]) -> Iterator[Line]:
    for call in calls:
        if call.args and (level := _level(call.func)):
            fields = sorted((k.arg or "**") for k in call.keywords if k.arg not in _NOT_LOGGED)
            yield Line(_text(call.args[0]), level, tuple(fields))


def _level(function: ast.expr) -> str:
    """Return the level of a call that logs; "" for any other. `write` is one of two levels of a record."""
    match function:
        case ast.Attribute(value=ast.Name(id=name), attr=level) if level in LEVELS and _is_logger(name):
            return level
        case ast.Attribute(value=ast.Call(func=ast.Attribute(attr="get_logger" | "getLogger")), attr=level):
            return level if level in LEVELS else ""
        case ast.Name(id="render"):
            return "warning"
    return ""


def _is_logger(name: str) -> bool:
    return name.lower().rpartition("_")[2] in ("log", "logger")


def _text(event: ast.expr) -> str:
    match event:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in values)
    return COMPUTED


def _logger_names(calls: Iterable[ast.Call]) -> Iterator[str]:
    for call in calls:
        match call:
            case ast.Call(
                func=ast.Attribute(attr="getLogger") | ast.Name(id="init_logger"),
                args=[ast.Constant(value=str(name))],
            ):
                yield name


def _records() -> dict[str, Any]:
    """Return the fields of each kind of record's line, as logged."""
    with _every_level(), structlog.testing.capture_logs() as captured:
        for kind in get_args(Record):
            log_record(example_of(types.type_info(kind), "record"))
        for record in (*records(), pull_record("failed", Code.DEADLINE)):
            log_record(record)
    found: dict[str, dict[str, str]] = {}
    for line in captured:
        event, level = line.pop("event"), line.pop("log_level")
        fields = found.setdefault(f"{event}, {level}", {})
        fields |= {name: type(value).__name__ for name, value in line.items()}
    return sorted_map(found)


@contextmanager
def _every_level() -> Iterator[None]:
    """Log every level meanwhile, whatever a test before this one has configured."""
    before = structlog.get_config()
    structlog.reset_defaults()
    try:
        yield
    finally:
        structlog.configure(**before)
