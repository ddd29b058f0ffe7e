"""The metrics and the log lines of this checkout, read from the code, where no table has them whole.

Settings, codes, routes and verbs are not here: `SETTINGS`, `Code`, `ROUTES` and `VERBS` are their tables.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, get_args

import structlog
from msgspec.structs import replace

from kvxferd.errors import Code
from kvxferd.records import (
    HandshakeRecord,
    PlacementRecord,
    PullRecord,
    Record,
    TransportsRecord,
)
from kvxferd.telemetry.logs import log_record
from kvxferd.telemetry.metrics import Metrics
from tests.support.node_samples import node_snapshot, pull_record, records
from tests.support.repository import files_in, parsed, text_of

LEVELS = ("debug", "info", "warning", "error", "exception", "critical")
COMPUTED_EVENT = "(computed)"
OTHER_FIELDS = "others"
_NOT_LOGGED = {"limit_by", "exc_info"}
# Labels of any text: an engine's, a peer's, a release's.
_LABELS_FROM_OUTSIDE = {"source", "sink", "peer", "version"}
_VLLM_PREFIX = "vllm:"
_LOGS = re.compile(r"(?i)(\b|_)(log|logger)\b|structlog|getLogger|init_logger")
_STANDARD_LOGGER = re.compile(r"(getLogger|init_logger)\(")

# --- metrics


class MetricFamily(NamedTuple):
    """A metric of the daemon: the names of its series, and its labels with their values from the start."""

    kind: str
    help: str
    series: list[str]
    labels: dict[str, list[str]]


def daemon_metrics() -> dict[str, MetricFamily]:
    """Return the daemon's metrics by name, those of engines and peers included."""
    metrics = Metrics(by_engine=True, by_peer=True)
    for record in (*records(), pull_record("failed", Code.DEADLINE)):
        metrics.record(record)
    families = {}
    for family in metrics.scrape(node_snapshot()).collect():
        labels: dict[str, set[str]] = {}
        for sample in family.samples:
            for label, value in sample.labels.items():
                values = labels.setdefault(label, set())
                if label not in _LABELS_FROM_OUTSIDE:
                    values.add(value)
        series = sorted({sample.name for sample in family.samples})
        closed = {label: sorted(values) for label, values in sorted(labels.items())}
        families[family.name] = MetricFamily(family.type, family.documentation, series, closed)
    return dict(sorted(families.items()))


def connector_metrics() -> dict[str, str]:
    """Return name and help of each metric of the vLLM connector, from its tables: vLLM is not needed."""
    found: dict[str, str] = {}
    for path in files_in("kvxferd/integrations"):
        if path.suffix == ".py" and _VLLM_PREFIX in text_of(path):
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.Tuple):
                    texts = [
                        e.value for e in node.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)
                    ]
                    found |= {text: texts[-1] for text in texts if text.startswith(_VLLM_PREFIX)}
    return dict(sorted(found.items()))


# --- log lines


class Line(NamedTuple):
    """A call that logs: its event (or its sentence), its level, and the names of its fields."""

    event: str
    level: str
    fields: tuple[str, ...] = ()


def record_lines() -> list[Line]:
    """Return the lines of records: by event and level, with every field that one of them has."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    with _every_level(), structlog.testing.capture_logs() as captured:
        for record in _records():
            log_record(record)
    for line in captured:
        fields = found.setdefault((line.pop("event"), line.pop("log_level")), {})
        fields |= dict.fromkeys(line)
    return [Line(event, level, tuple(fields)) for (event, level), fields in sorted(found.items())]


def _records() -> Iterator[Record]:
    """Yield records whose lines have every level and field. Raises LookupError where a kind is missing."""
    shown = [*records(), pull_record("failed", Code.DEADLINE)]
    if missing := set(get_args(Record)) - {type(record) for record in shown}:
        raise LookupError(f"no sample of {missing}")
    for record in shown:
        yield record
        match record:
            case PullRecord(outcome="delivered"):
                yield replace(record, handover_s=0.5)
            case HandshakeRecord():
                yield replace(record, outcome="engine-unknown", message="cannot")
            case PlacementRecord():
                yield replace(record, proved=not record.proved, why="no driver")
            case TransportsRecord():
                yield replace(record, slow=not record.slow)


@contextmanager
def _every_level() -> Iterator[None]:
    """Log every level meanwhile, whatever is configured in this process."""
    before = structlog.get_config()
    structlog.reset_defaults()
    try:
        yield
    finally:
        structlog.configure(**before)


def event_lines() -> list[Line]:
    """Return the daemon's other lines: what structlog logs."""
    return sorted({line for line in _lines() if line.event != COMPUTED_EVENT})


def _lines() -> Iterator[Line]:
    """Yield each call that logs an event, from the syntax trees; movers and workers log sentences."""
    for path in files_in("kvxferd"):
        text = text_of(path)
        if path.suffix != ".py" or not _LOGS.search(text):
            continue
        if "import structlog" not in text and _STANDARD_LOGGER.search(text):
            continue
        for call in ast.walk(parsed(path)):
            if isinstance(call, ast.Call) and call.args and (level := _level_of(call.func)):
                names = {k.arg or OTHER_FIELDS for k in call.keywords} - _NOT_LOGGED
                fields = sorted(names - {OTHER_FIELDS}) + sorted(names & {OTHER_FIELDS})
                yield Line(_text_of(call.args[0]), level, tuple(fields))


def _level_of(function: ast.expr) -> str:
    """Return the level of a call that logs; "" for any other. `write` is one of two levels of a record."""
    match function:
        case ast.Attribute(value=ast.Name(id=name), attr=level) if level in LEVELS:
            return level if name.lower().rpartition("_")[2] in ("log", "logger") else ""
        case ast.Attribute(value=ast.Call(func=ast.Attribute(attr="get_logger" | "getLogger")), attr=level):
            return level if level in LEVELS else ""
        case ast.Name(id="render"):
            return "warning"
    return ""


def _text_of(event: ast.expr) -> str:
    match event:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in values)
    return COMPUTED_EVENT
