"""The log: one line for each thing that ended, in the form that was asked for."""

import io
import json
import logging

import msgspec
import pytest
import structlog

from kvxferd.config import LogConfig
from kvxferd.core.snapshot import PlacementRecord
from kvxferd.errors import Code
from kvxferd.telemetry.logs import configure_logs, log_record, operator_log
from tests.support.node_samples import pull_record, records


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    """Every line, decoded; one that is not JSON fails the test."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_one_json_line_for_each_record() -> None:
    stream = io.StringIO()
    configure_logs(LogConfig(format="auto"), stream)  # not a terminal: JSON
    for record in records():
        log_record(record)
    handshake, pull, failed, release, placement, connected = lines(stream)
    assert handshake["event"] == "handshake"
    assert handshake["ranks"] == 8
    assert pull["transfer"] == "req-0"
    assert pull["level"] == "info"
    assert pull["rank"] == "pp0.tp1"
    assert pull["wire_s"] == 0.01
    assert "code" not in pull
    assert failed["level"] == "warning"
    assert failed["code"] == "lease-expired"
    assert failed["message"] == "cannot pull"
    assert release["why"] == "completed"
    assert (placement["event"], placement["level"]) == ("placement", "info")
    assert (placement["placement"], placement["lanes"]) == ("direct", "cma")
    assert placement["gigabytes_per_s"] == 4.75
    assert "why" not in placement
    assert (connected["event"], connected["level"], connected["lanes"]) == ("connected", "warning", "tcp")
    assert "hostPID" in str(connected["message"])


def test_memory_that_is_not_proved_is_a_warning():
    stream = io.StringIO()
    configure_logs(LogConfig(format="json"), stream)
    record = next(record for record in records() if isinstance(record, PlacementRecord))
    log_record(msgspec.structs.replace(record, proved=False, why="a read brought other bytes"))
    (line,) = lines(stream)
    assert (line["level"], line["why"]) == ("warning", "a read brought other bytes")


def test_a_quiet_level_keeps_failures() -> None:
    stream = io.StringIO()
    configure_logs(LogConfig(level="warning", format="json"), stream)
    log_record(pull_record())
    log_record(pull_record("failed", Code.DEADLINE))
    assert [line["code"] for line in lines(stream)] == ["deadline"]


def test_libraries_write_the_same_form() -> None:
    stream = io.StringIO()
    configure_logs(LogConfig(format="json"), stream)
    try:
        raise RuntimeError("lost")
    except RuntimeError:
        logging.getLogger("asyncio").exception("task %s failed", "t1")
    (line,) = lines(stream)
    assert line["event"] == "task t1 failed"
    assert "RuntimeError: lost" in str(line["exception"])


def test_people_get_text() -> None:
    stream = io.StringIO()
    configure_logs(LogConfig(format="console"), stream)
    log_record(pull_record())
    assert "transfer=req-0" in stream.getvalue()


def test_what_an_operator_does_is_a_line_at_every_level():
    stream = io.StringIO()
    configure_logs(LogConfig(format="json", level="error"), stream)
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
    configure_logs(LogConfig(format="console"), stream)
    operator_log.warning("drained")
    assert "drained" in stream.getvalue()
    assert ("\x1b" in stream.getvalue()) == is_coloured
