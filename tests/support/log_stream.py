"""The log of this process, on a stream of a test's."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from kvxferd.config import LogConfig
from kvxferd.telemetry.logs import configure_logs


class LogStream(io.StringIO):
    """What the process has logged."""

    def lines(self) -> list[dict[str, Any]]:
        """Decode every line; one that is not JSON fails the test."""
        return [json.loads(line) for line in self.getvalue().splitlines()]


@contextmanager
def json_log(*, is_terminal: bool = False, **config: Any) -> Iterator[LogStream]:
    """Write the log there meanwhile, as JSON where no other format is given."""
    root, stream = logging.getLogger(), LogStream()
    handlers, level = list(root.handlers), root.level
    config = {"format": "json"} | config
    configure_logs(LogConfig(**config), lambda line, _: print(line, file=stream), is_terminal)
    try:
        yield stream
    finally:
        structlog.reset_defaults()
        root.handlers, root.level = handlers, level
