"""A daemon whose loop is watched: `python -m MODULE serve ...` is `kvxferd serve ...`.

A timer of the loop's own runs every few milliseconds, and compares the processor time of the loop's thread
with that of its last run. A turn that takes long delays the timer, so the longest difference is the longest
turn's processor time, to within the timer's period; other processes do not count. It is written into the file
`meter` of the directory above $HOME.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import numpy as np

from kvxferd import daemon
from kvxferd.cli import main

PERIOD_S = 0.004


def watch(path: Path) -> None:
    """Watch the running loop."""
    loop = asyncio.get_running_loop()
    longest_ms = np.memmap(path, np.float64, "r+", shape=(1,))

    def ran(last: float) -> None:
        now = time.thread_time()
        longest_ms[0] = max(longest_ms[0], (now - last - PERIOD_S) * 1e3)
        loop.call_later(PERIOD_S, ran, now)

    ran(time.thread_time())


if __name__ == "__main__":
    run = daemon.Daemon.run

    async def watched(self: daemon.Daemon) -> int:
        watch(Path(os.environ["HOME"]).parent / "meter")
        return await run(self)

    daemon.Daemon.run = watched  # type: ignore[method-assign]
    main()
