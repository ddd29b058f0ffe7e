"""A daemon whose loop is watched: `python -m MODULE serve ...` is `kvxferd serve ...`.

HOSTILE_METER names a file of `Meter`'s layout. A timer of the loop's own runs every few milliseconds, and
compares the processor time of the loop's thread with that of its last run. A turn that takes long delays the
timer, so the longest difference is the longest turn's processor time, to within the timer's period; other
processes do not count. A thread writes down where the loop is while a turn is long.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import struct
import sys
import threading
import time
import traceback
from pathlib import Path

from kvxferd import daemon
from kvxferd.cli import main as kvxferd

METER_VARIABLE = "HOSTILE_METER"
PERIOD_S = 0.004
LONG_S = 0.05  # a turn that is worth knowing the place of
MAX_PLACES = 200
_FORM = struct.Struct("<dQ")  # the longest turn in ms, turns that were measured


class Meter:
    """What the stage reads and resets, in a file that both map."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _FORM.size)

    @staticmethod
    def make(path: Path, uid: int) -> Meter:
        """A new one, that a daemon of that user may write."""
        path.write_bytes(_FORM.pack(0.0, 0))
        os.chown(path, uid, -1)
        return Meter(path)

    def read(self) -> tuple[float, int]:
        worst_ms, turns = _FORM.unpack_from(self._memory)
        return worst_ms, turns

    def reset(self) -> None:
        _FORM.pack_into(self._memory, 0, 0.0, self.read()[1])

    def add(self, took_ms: float) -> None:
        worst_ms, turns = self.read()
        _FORM.pack_into(self._memory, 0, max(worst_ms, took_ms), turns + 1)


class Watch:
    """Belongs to one running loop."""

    def __init__(self, meter: Meter, places: Path) -> None:
        self._meter = meter
        self._places = places
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._last = time.clock_gettime(self._clock)
        self._loop.call_later(PERIOD_S, self._ran)
        threading.Thread(target=self._look, daemon=True, name="hostile-watch").start()

    def _ran(self) -> None:
        now = time.clock_gettime(self._clock)
        self._meter.add((now - self._last - PERIOD_S) * 1e3)
        self._last = now
        self._loop.call_later(PERIOD_S, self._ran)

    def _look(self) -> None:
        """Note once in each long turn where it is."""
        num_noted, noted = 0, 0.0
        while num_noted < MAX_PLACES:
            time.sleep(LONG_S / 2)
            since = self._last
            if since == noted or time.clock_gettime(self._clock) - since < LONG_S:
                continue
            noted = since
            num_noted += 1
            frame = sys._current_frames().get(self._thread)
            with contextlib.suppress(OSError), self._places.open("a") as file:
                file.write("".join(traceback.format_stack(frame)[-8:]) + "\n")


def main() -> None:
    path = Path(os.environ[METER_VARIABLE])
    meter = Meter(path)
    run = daemon.Daemon.run

    async def watched(self: daemon.Daemon) -> int:
        Watch(meter, path.with_suffix(".places"))
        return await run(self)

    daemon.Daemon.run = watched  # type: ignore[method-assign]
    kvxferd()


if __name__ == "__main__":
    main()
