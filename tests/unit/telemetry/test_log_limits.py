"""How often one kind of line may be logged."""

from __future__ import annotations

import io
import json
import logging

import structlog

from kvxferd.config import LogConfig
from kvxferd.telemetry import log_limits
from kvxferd.telemetry.log_limits import (
    MAX_LINES_PER_EVENT,
    MAX_LINES_PER_SOURCE,
    MAX_SOURCES,
    WINDOW_S,
    LogRateLimiter,
)
from kvxferd.telemetry.log_queue import LogCounts
from kvxferd.telemetry.logs import configure_logs, set_log_level


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
    configure_logs(LogConfig(format="json"), stream)
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
    configure_logs(LogConfig(format="json", level="warning"), stream)
    log = structlog.get_logger()
    log.info("one")
    set_log_level("debug")
    log.debug("two")
    set_log_level("error")
    log.warning("three")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["two"]
