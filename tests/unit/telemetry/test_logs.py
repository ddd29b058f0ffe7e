"""The log: one line for each thing that ended, in the form that was asked for."""

from __future__ import annotations

import io
import json
import logging

import msgspec
import pytest
import structlog

from kvxferd.config import LogConfig
from kvxferd.records import PlacementRecord
from kvxferd.telemetry import log_limits
from kvxferd.telemetry.log_buffer import LogCounts
from kvxferd.telemetry.log_limits import (
    MAX_LINES_PER_EVENT,
    MAX_LINES_PER_SOURCE,
    MAX_SOURCES,
    WINDOW_S,
    LogRateLimiter,
)
from kvxferd.telemetry.logs import log_record, operator_log, set_log_level
from tests.support.log_stream import log_to
from tests.support.node_samples import records


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    """Every line, decoded; one that is not JSON fails the test."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_one_json_line_for_each_record() -> None:
    stream = io.StringIO()
    log_to(LogConfig(format="auto"), stream)  # not a terminal: JSON
    for record in records():
        log_record(record)
    handshake, pull, failed, release, placement, lanes = lines(stream)
    assert handshake["event"] == "handshake"
    assert handshake["num_ranks"] == 8
    assert pull["transfer_id"] == "req-0"
    assert pull["level"] == "info"
    assert pull["phases_s"] == {"queue": 0.001, "wire": 0.01}
    assert "code" not in pull
    assert "started_at" not in pull
    assert failed["level"] == "warning"
    assert failed["code"] == "lease-expired"
    assert failed["message"] == "cannot pull"
    assert release["why"] == "completed"
    assert (placement["event"], placement["level"]) == ("placement", "info")
    assert (placement["placement"], placement["lanes"]) == ("direct", "cma")
    assert placement["gigabytes_per_s"] == 4.75
    assert "why" not in placement
    assert (lanes["event"], lanes["level"], lanes["lanes"]) == ("lanes", "warning", "tcp")


def test_memory_that_is_not_proved_is_a_warning():
    stream = io.StringIO()
    log_to(LogConfig(format="json"), stream)
    record = next(record for record in records() if isinstance(record, PlacementRecord))
    log_record(msgspec.structs.replace(record, proved=False, why="a read brought other bytes"))
    (line,) = lines(stream)
    assert (line["level"], line["why"]) == ("warning", "a read brought other bytes")


def test_libraries_write_the_same_form() -> None:
    stream = io.StringIO()
    log_to(LogConfig(format="json"), stream)
    try:
        raise RuntimeError("lost")
    except RuntimeError:
        logging.getLogger("asyncio").exception("task %s failed", "t1")
    (line,) = lines(stream)
    assert line["event"] == "task t1 failed"
    assert "RuntimeError: lost" in str(line["exception"])


def test_what_an_operator_does_is_a_line_at_every_level():
    stream = io.StringIO()
    log_to(LogConfig(format="json", level="error"), stream)
    structlog.get_logger().warning("of the daemon's own")
    operator_log.info("configuration reloaded", changed=["log.level"])
    (line,) = lines(stream)
    assert (line["event"], line["level"], line["changed"]) == (
        "configuration reloaded",
        "info",
        ["log.level"],
    )


@pytest.mark.parametrize(("no_color", "is_coloured"), [("", True), ("1", False)])
def test_without_color_a_terminal_gets_no_escape_sequence(
    no_color: str, is_coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TerminalText(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("NO_COLOR", no_color)
    stream = TerminalText()
    log_to(LogConfig(format="console"), stream)
    operator_log.warning("drained")
    assert "drained" in stream.getvalue()
    assert ("\x1b" in stream.getvalue()) == is_coloured


# --- how often one kind of line may be logged


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_one_source_has_some_lines_a_window_and_then_a_number() -> None:
    clock, counts = Clock(), LogCounts()
    limiter = LogRateLimiter(clock, counts)
    admitted = [limiter.admit("closed", "uid 7") for _ in range(50)]
    assert admitted == [0] * MAX_LINES_PER_SOURCE + [None] * (50 - MAX_LINES_PER_SOURCE)
    assert limiter.admit("closed", "uid 8") == 0
    assert counts.suppressed == 50 - MAX_LINES_PER_SOURCE
    clock.now += WINDOW_S
    assert limiter.admit("closed", "uid 7") == 50 - MAX_LINES_PER_SOURCE
    assert limiter.admit("closed", "uid 7") == 0


def test_many_sources_together_have_a_limit_and_cost_bounded_memory() -> None:
    clock, counts = Clock(), LogCounts()
    limiter = LogRateLimiter(clock, counts)
    admitted = [limiter.admit("turned away", f"{number}" * 1000) for number in range(5_000)]
    assert sum(number is not None for number in admitted) == MAX_LINES_PER_EVENT
    assert len(limiter._windows) <= MAX_SOURCES
    assert max(len(source) for _, source in limiter._windows) <= log_limits.MAX_KEY_CHARS
    assert limiter.admit("another event") == 0


def test_lines_of_a_logger_and_of_libraries_are_limited_and_records_are_not() -> None:
    stream = io.StringIO()
    log_to(LogConfig(format="json"), stream)
    log = structlog.get_logger()
    for _ in range(20):
        log.warning("closed", limit_by="uid 7", pid=1)
    for _ in range(2 * MAX_LINES_PER_EVENT):
        log.info("pull")
        logging.getLogger("aiohttp.server").error("bad request from %s", "1.2.3.4")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    closed = [line for line in lines if line["event"] == "closed"]
    assert len(closed) == MAX_LINES_PER_SOURCE
    assert all("limit_by" not in line and line["pid"] == 1 for line in closed)
    assert sum(line["event"] == "pull" for line in lines) == 2 * MAX_LINES_PER_EVENT
    assert sum(line["event"] == "bad request from 1.2.3.4" for line in lines) == MAX_LINES_PER_EVENT


def test_the_level_can_be_changed_while_it_runs() -> None:
    stream = io.StringIO()
    log_to(LogConfig(format="json", level="warning"), stream)
    log = structlog.get_logger()
    log.info("one")
    set_log_level("debug")
    log.debug("two")
    set_log_level("error")
    log.warning("three")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["two"]
