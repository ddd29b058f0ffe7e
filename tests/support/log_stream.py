"""The log of this process, on a stream of a test's."""

from __future__ import annotations

from typing import TextIO

from kvxferd.config import LogConfig
from kvxferd.telemetry.logs import configure_logs


def log_to(config: LogConfig, stream: TextIO) -> None:
    """Write the log there from now on."""
    configure_logs(config, lambda line, _: print(line, file=stream), stream.isatty())
