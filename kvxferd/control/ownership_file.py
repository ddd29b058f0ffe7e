"""Whose engine ids are, kept across a daemon's restarts: one small file in the run directory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import structlog

from kvxferd.ids import EngineId

log = structlog.get_logger()

Listed = tuple[tuple[EngineId, int], ...]

# Ranks of an engine come within moments of one another: one write for all of them.
WRITE_AFTER_S = 0.2
MAX_FILE_BYTES = 16 << 20  # 4096 ids of 256 characters, each written in 12 bytes at most


class OwnershipFile:
    """Reads at start, writes a little after each change, in a thread: a slow disk stops nobody."""

    def __init__(self, path: Path, listed: Callable[[], Listed]) -> None:
        self._path = path
        self._listed = listed
        self._writing: asyncio.Task[None] | None = None
        self._written: Listed | None = None

    def read(self) -> Listed:
        """Return what was written last. A file that is none is put aside, and nobody owns anything."""
        try:
            if self._path.stat().st_size > MAX_FILE_BYTES:
                raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
            kept = msgspec.json.decode(self._path.read_bytes(), type=dict[EngineId, int])
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, RecursionError) as error:
            aside = self._path.with_suffix(".unreadable")
            log.error(
                "cannot read whose engine ids are: the first to register has each",
                path=str(self._path),
                reason=str(error),
                kept_as=str(aside),
            )
            try:
                self._path.replace(aside)
            except OSError as failure:
                log.error("cannot put it aside", path=str(self._path), reason=str(failure))
            return ()
        return tuple(kept.items())

    def save_soon(self) -> None:
        """Have the present list written."""
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._save())

    async def close(self) -> None:
        """Write what is not written."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
            await asyncio.to_thread(self._write, self._listed())

    async def _save(self) -> None:
        while (listed := self._listed()) != self._written:
            await asyncio.sleep(WRITE_AFTER_S)
            listed = self._listed()
            await asyncio.to_thread(self._write, listed)
            self._written = listed  # also where it failed: the next change tries again

    def _write(self, listed: Iterable[tuple[EngineId, int]]) -> None:
        fresh = self._path.with_suffix(".new")
        try:
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.json.encode(dict(listed)))
            fresh.replace(self._path)
        except OSError as error:
            log.error("cannot write whose engine ids are", path=str(self._path), reason=error.strerror)
