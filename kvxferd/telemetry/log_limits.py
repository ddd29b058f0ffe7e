"""Rate limits of the log: a remote client that repeats an error must not fill it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from typing import Any

import structlog

from kvxferd.records import RECORD_KINDS
from kvxferd.telemetry.log_buffer import LOG_COUNTS, LogCounts

WINDOW_S = 10.0
# Of one event and one source (a user, an address): the first lines show what is wrong, more add nothing.
MAX_LINES_PER_SOURCE = 3
# Of one event, from all sources: a node of 64 ranks may log one line for each. 10 lines a second of
# 1 KiB are 1 GB a day, which a log rotation handles.
MAX_LINES_PER_EVENT = 100
# Sources kept: 1,024 of at most 300 bytes are 300 KB. An evicted source may log MAX_LINES_PER_SOURCE
# lines again; MAX_LINES_PER_EVENT still holds.
MAX_SOURCES = 1_024
MAX_KEY_CHARS = 128
# docs/how-to/monitor.md promises one line for each. Only a process with a registered rank can cause them,
# and operator requests only root and the daemon's own user.
UNLIMITED_EVENTS = frozenset({"operator request", *RECORD_KINDS})

_Key = tuple[str, str]


class LogRateLimiter:
    """Counts lines in windows of `WINDOW_S`, by event and source."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, counts: LogCounts = LOG_COUNTS) -> None:
        self._clock = clock
        self._counts = counts
        self._windows: OrderedDict[_Key, _Window] = OrderedDict()

    def admit(self, event: str, source: str = "") -> int | None:
        """Return how many such lines were suppressed since the last one; None: suppress this one too."""
        event, source = event[:MAX_KEY_CHARS], source[:MAX_KEY_CHARS]
        num_suppressed = self._admit_key((event, source), MAX_LINES_PER_SOURCE) if source else 0
        if num_suppressed is None:
            return None
        of_event = self._admit_key((event, ""), MAX_LINES_PER_EVENT)
        return None if of_event is None else num_suppressed + of_event

    def _admit_key(self, key: _Key, max_lines: int) -> int | None:
        now = self._clock()
        window = self._windows.pop(key, None) or _Window(now)
        self._windows[key] = window  # the last used is last
        if len(self._windows) > MAX_SOURCES:
            self._windows.popitem(last=False)
        if now - window.started >= WINDOW_S:
            window.started, window.num_lines = now, 0
        window.num_lines += 1
        if window.num_lines > max_lines:
            window.num_suppressed += 1
            self._counts.suppressed += 1
            return None
        num_suppressed, window.num_suppressed = window.num_suppressed, 0
        return num_suppressed


class _Window:
    __slots__ = ("num_lines", "num_suppressed", "started")

    def __init__(self, started: float) -> None:
        self.started = started
        self.num_lines = 0
        self.num_suppressed = 0


class RateLimitProcessor:
    """The limiter as a structlog processor. `limit_by=` of a log call names the source; it is not logged.

    Lines of the standard library's logging (asyncio's, aiohttp's, the movers') are limited by their template.
    """

    def __init__(self, limiter: LogRateLimiter) -> None:
        self._limiter = limiter

    def __call__(
        self, logger: Any, method: str, fields: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """Return the line, with `suppressed` if lines before it were dropped. Raises DropEvent."""
        source, library = fields.pop("limit_by", ""), fields.get("_record")
        event = f"{library.name} {library.msg}" if library is not None else str(fields.get("event", ""))
        if event in UNLIMITED_EVENTS:
            return fields
        num_suppressed = self._limiter.admit(event, str(source))
        if num_suppressed is None:
            raise structlog.DropEvent
        if num_suppressed:
            fields["suppressed"] = num_suppressed
        return fields
