"""Saves who owns each rank across the daemon's restarts, in the run directory."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import structlog

from kvxferd.core.events import SavedRank
from kvxferd.threads import on_thread

log = structlog.get_logger()

SavedRanks = tuple[SavedRank, ...]

# Ranks of an engine register at nearly the same time: one write for all of them.
WRITE_AFTER_S = 0.2
# Peers that join and leave must not cause endless writes: 8,192 ranks are written every two seconds.
WRITE_AFTER_S_PER_RANK = 2.0 / 8192
RETRY_S = 2.0  # after a write that failed: the disk was full, or the daemon had no descriptor left
CLOSE_S = 5.0  # for a running write when the daemon stops
# 8192 ranks of two names each, of 256 characters of at most 6 bytes, and a key: 26 MB.
MAX_FILE_BYTES = 32 << 20

_NEW_SUFFIX = ".new"


class OwnershipFile:
    """Reads the file at start, and writes it in a thread after changes: a slow disk blocks nothing.

    A write that fails is repeated, and logged once for each reason.
    """

    def __init__(self, path: Path, current: Callable[[], SavedRanks]) -> None:
        self._path = path
        self._current = current
        self._save_task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()  # nothing is waited for any more
        self._written: SavedRanks | None = None

    def read(self) -> SavedRanks:
        """Return the saved owners. Rename a file that cannot be decoded, and return none."""
        with suppress(OSError):
            for left in self._path.parent.glob(f"{self._path.stem}*{_NEW_SUFFIX}"):
                left.unlink()  # of a daemon that was killed while it wrote
        try:
            if self._path.stat().st_size > MAX_FILE_BYTES:
                raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
            return msgspec.json.decode(self._path.read_bytes(), type=SavedRanks)
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, RecursionError) as error:
            aside = self._path.with_suffix(".unreadable")
            log.error(
                "ownership file unreadable",
                path=str(self._path),
                reason=str(error),
                kept_as=str(aside),
            )
            try:
                self._path.replace(aside)
            except OSError as failure:
                log.error("ownership file not renamed", path=str(self._path), reason=str(failure))
            return ()

    def save_soon(self) -> None:
        """Schedule a write of the current owners."""
        if self._save_task is None or self._save_task.done():
            self._save_task = asyncio.get_running_loop().create_task(self._save())

    async def close(self) -> None:
        """Write unsaved changes, if the owners have ever changed."""
        if self._save_task is None:
            return
        self._closing.set()
        self.save_soon()
        await asyncio.wait([self._save_task], timeout=CLOSE_S)
        if not self._save_task.done():
            reason = f"a write has not ended within {CLOSE_S:g} s"
            log.error("ownership file not written", path=str(self._path), reason=reason)

    async def _save(self) -> None:
        problem = ""
        while (listed := self._current()) != self._written:
            pause_s = RETRY_S if problem else WRITE_AFTER_S + len(listed) * WRITE_AFTER_S_PER_RANK
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._closing.wait()
            is_last, listed = self._closing.is_set(), self._current()
            try:
                await on_thread(partial(self._write, listed), "owners")
                self._written, problem = listed, ""
            except (OSError, RuntimeError) as error:  # the latter: the system has no thread now
                reason = getattr(error, "strerror", "") or str(error)
                if reason != problem:
                    log.error("ownership file not written", path=str(self._path), reason=reason)
                problem = reason
                if is_last:
                    return

    def _write(self, listed: SavedRanks) -> None:
        content = msgspec.json.encode(listed)
        fresh: Path | None = None
        try:
            fd, name = tempfile.mkstemp(_NEW_SUFFIX, f"{self._path.stem}.", self._path.parent)  # 0600
            fresh = Path(name)
            with os.fdopen(fd, "wb") as file:
                file.write(content)
            fresh.replace(self._path)
        except OSError:
            if fresh is not None:
                with suppress(OSError):
                    fresh.unlink()
            raise
