"""The log: one line for each thing that ended, in the form that was asked for."""

from __future__ import annotations

import logging
from collections import Counter

import msgspec
import pytest
import structlog

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
from tests.support.log_stream import json_log
from tests.support.node_samples import records


def test_one_json_line_for_each_record() -> None:
    with json_log(format="auto") as log:  # not a terminal: JSON
        for record in records():
            log_record(record)
            if isinstance(record, PlacementRecord):
                log_record(msgspec.structs.replace(record, proved=False, why="a read brought other bytes"))
    lines = log.lines()
    assert [(line["event"], line["level"]) for line in lines] == [
        ("handshake", "info"),
        ("pull", "info"),
        ("pull", "warning"),
        ("release", "info"),
        ("placement", "info"),
        ("placement", "warning"),
        ("lanes", "warning"),
    ]
    _, pull, failed, release, placement, unproved, _ = lines
    assert (pull["transfer_id"], pull["phases_s"]) == ("req-0", {"queue": 0.001, "wire": 0.01})
    assert not pull.keys() & {"code", "started_at"}
    assert (failed["code"], failed["message"]) == ("lease-expired", "cannot pull")
    assert release["why"] == "completed"
    assert (placement["placement"], placement["lanes"]) == ("direct", "cma")
    assert "why" not in placement
    assert unproved["why"] == "a read brought other bytes"


def test_libraries_write_the_same_form() -> None:
    with json_log() as log:
        try:
            raise RuntimeError("lost")
        except RuntimeError:
            logging.getLogger("asyncio").exception("task %s failed", "t1")
    (line,) = log.lines()
    assert line["event"] == "task t1 failed"
    assert "RuntimeError: lost" in str(line["exception"])


@pytest.mark.parametrize(("no_color", "is_coloured"), [("", True), ("1", False)])
def test_without_color_a_terminal_gets_no_escape_sequence(
    no_color: str, is_coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    with json_log(format="console", is_terminal=True) as log:
        operator_log.warning("drained")
    assert "drained" in log.getvalue()
    assert ("\x1b" in log.getvalue()) == is_coloured


# --- how often one kind of line may be logged


def test_one_source_has_some_lines_a_window_and_then_a_number() -> None:
    now, counts = 100.0, LogCounts()
    limiter = LogRateLimiter(lambda: now, counts)
    admitted = [limiter.admit("closed", "uid 7") for _ in range(50)]
    assert admitted == [0] * MAX_LINES_PER_SOURCE + [None] * (50 - MAX_LINES_PER_SOURCE)
    assert limiter.admit("closed", "uid 8") == 0
    assert counts.suppressed == 50 - MAX_LINES_PER_SOURCE
    now += WINDOW_S
    assert limiter.admit("closed", "uid 7") == 50 - MAX_LINES_PER_SOURCE
    assert limiter.admit("closed", "uid 7") == 0


def test_many_sources_together_have_a_limit_and_cost_bounded_memory() -> None:
    limiter = LogRateLimiter(lambda: 100.0, LogCounts())
    admitted = [limiter.admit("turned away", f"{number}" * 1000) for number in range(5_000)]
    assert sum(number is not None for number in admitted) == MAX_LINES_PER_EVENT
    assert len(limiter._windows) <= MAX_SOURCES
    assert max(len(source) for _, source in limiter._windows) <= log_limits.MAX_KEY_CHARS
    assert limiter.admit("another event") == 0


def test_lines_of_a_logger_and_of_libraries_are_limited_and_records_are_not() -> None:
    with json_log() as log:
        logger = structlog.get_logger()
        for _ in range(20):
            logger.warning("closed", limit_by="uid 7", pid=1)
        for _ in range(2 * MAX_LINES_PER_EVENT):
            logger.info("pull")
            logging.getLogger("aiohttp.server").error("bad request from %s", "1.2.3.4")
    lines = log.lines()
    closed = [line for line in lines if line["event"] == "closed"]
    assert len(closed) == MAX_LINES_PER_SOURCE
    assert all("limit_by" not in line and line["pid"] == 1 for line in closed)
    events = Counter(line["event"] for line in lines)
    assert events["pull"] == 2 * MAX_LINES_PER_EVENT
    assert events["bad request from 1.2.3.4"] == MAX_LINES_PER_EVENT


def test_the_level_can_be_changed_while_it_runs_and_what_an_operator_does_is_a_line_at_every() -> None:
    with json_log(level="warning") as log:
        logger = structlog.get_logger()
        logger.info("one")
        set_log_level("debug")
        logger.debug("two")
        set_log_level("error")
        logger.warning("three")
        operator_log.info("configuration reloaded")
    assert [(line["event"], line["level"]) for line in log.lines()] == [
        ("two", "debug"),
        ("configuration reloaded", "info"),
    ]
