"""The log: structured lines on standard error, for people on a terminal and JSON elsewhere."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
from collections.abc import Callable, MutableMapping
from typing import Any

import msgspec
import structlog

from kvxferd.config import LogConfig
from kvxferd.records import (
    HandshakeRecord,
    PlacementRecord,
    PullRecord,
    Record,
    ReleaseRecord,
    TransportsRecord,
)
from kvxferd.telemetry.log_buffer import LOG_BUFFER, StderrStream
from kvxferd.telemetry.log_limits import LogRateLimiter, RateLimitProcessor

STDERR_FD = 2

_ERROR_METHODS = frozenset({"error", "exception", "critical", "fatal"})
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

_log: Any = structlog.get_logger()
# For what an operator does to a running daemon: logged at every `log.level`.
operator_log: Any = structlog.wrap_logger(
    None, wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET)
)


def configure_queued_logs(config: LogConfig) -> None:
    """Set up the log of a process that must never wait for its standard error.

    `sys.stderr` uses the same buffer: a traceback at exit must not wait for a pipe either.
    """
    is_terminal = os.isatty(STDERR_FD)
    sys.stderr = stream = StderrStream(LOG_BUFFER, is_terminal=is_terminal)
    render = configure_logs(config, LOG_BUFFER.put, is_terminal)
    LOG_BUFFER.start(STDERR_FD, lambda num_dropped: render("log lines dropped", dropped=num_dropped))

    def close() -> None:
        stream.flush_partial_line()
        LOG_BUFFER.close()

    # Runs after the traceback of an uncaught exception, before the interpreter ends.
    atexit.register(close)


def set_log_level(level: str) -> None:
    """Log lines of at least this level from now on, and of libraries at least warnings."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]))
    logging.getLogger().setLevel(max(_LEVELS[level], logging.WARNING))


def configure_logs(
    config: LogConfig, put: Callable[[str, bool], None], is_terminal: bool
) -> Callable[..., str]:
    """Set up the log of this process and its libraries. Return the renderer of a warning.

    `put` gets each line, and whether it is an error.
    """
    is_json = config.format == "json" or (config.format == "auto" and not is_terminal)
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    final: list[Any] = (
        [structlog.processors.format_exc_info, _render_json]
        if is_json
        else [structlog.dev.ConsoleRenderer(colors=is_terminal and not os.environ.get("NO_COLOR"))]
    )
    limit = RateLimitProcessor(LogRateLimiter())

    def put_line(logger: Any, method: str, line: Any) -> str:
        put(line, method in _ERROR_METHODS)
        return ""

    structlog.configure(
        processors=[limit, *shared, *final, put_line],
        logger_factory=structlog.ReturnLoggerFactory(),
        cache_logger_on_first_use=False,
    )
    # asyncio and aiohttp use the standard library's logging: same form, at least warnings.
    handler = _LineHandler(put)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[limit, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
        )
    )
    logging.basicConfig(handlers=[handler], force=True)
    set_log_level(config.level)

    def render(event: str, **fields: object) -> str:
        line: Any = {"event": event, **fields}
        for processor in (*shared, *final):
            line = processor(None, "warning", line)
        return str(line)

    return render


_EMPTY: tuple[object, ...] = ("", None, (), {})
_OWN_TIMES = frozenset({"ended_at", "started_at"})  # the line has its own

# json.dumps makes an encoder for each line, which takes as long as the line.
_JSON = json.JSONEncoder(default=repr)


def _render_json(logger: Any, method: str, fields: MutableMapping[str, Any]) -> str:
    return _JSON.encode(fields)


class _LineHandler(logging.Handler):
    """The handler for lines of the standard library's logging."""

    def __init__(self, put: Callable[[str, bool], None]) -> None:
        super().__init__()
        self._put = put

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._put(self.format(record), record.levelno >= logging.ERROR)
        except structlog.DropEvent:
            pass
        except Exception:
            self.handleError(record)


def log_record(record: Record) -> None:
    """Log the one line of a record: the fields of `/v1/history` that are not empty."""
    write = _log.warning if _is_problem(record) else _log.info
    fields = msgspec.to_builtins(record)
    event = fields.pop("kind")
    shown = {
        name: _short(value) if isinstance(value, float | dict) else value
        for name, value in fields.items()
        if value not in _EMPTY and name not in _OWN_TIMES
    }
    write(event, **shown)


def _is_problem(record: Record) -> bool:
    match record:
        case PullRecord():
            return record.outcome != "delivered"
        case HandshakeRecord():
            return record.outcome != "ok"
        case PlacementRecord():
            return not record.proved
        case TransportsRecord():
            return record.slow
        case ReleaseRecord():
            return False


def _short(value: Any) -> Any:
    """Return the value with times to a microsecond."""
    if isinstance(value, dict):
        return {name: _short(of) for name, of in value.items()}
    return round(value, 6) if isinstance(value, float) else value
