"""A timer of the event loop that takes a sample each second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from kvxferd.telemetry.samples import Gauges, Samples

log = structlog.get_logger()


def _boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Sampler:
    """Takes a sample at each whole second of CLOCK_BOOTTIME, which goes on while a machine is suspended."""

    def __init__(
        self, samples: Samples, read_gauges: Callable[[], Gauges], clock: Callable[[], float] = _boot_time
    ) -> None:
        self._samples = samples
        self._read_gauges = read_gauges
        self._clock = clock  # seconds
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Set the first timer. Only on the loop's thread."""
        now = self._clock()
        self._samples.start(now)
        self._set(now)

    def stop(self) -> None:
        """Set no more timers."""
        if self._timer is not None:
            self._timer.cancel()

    def _set(self, now: float) -> None:
        # The half second allows for a timer that fires a little early: `finish_second` rounds.
        delay_s = max(0.5, round(now) + 1 - now)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def _fire(self) -> None:
        now = self._clock()
        self._set(now)  # first: an error below ends no sampling
        try:
            self._samples.finish_second(now, time.time(), self._read_gauges())
        except Exception:
            log.exception("sample failed")
