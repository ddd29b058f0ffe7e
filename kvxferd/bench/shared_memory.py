"""The memory of another process of this machine, mapped here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kvxferd.errors import EngineError
from kvxferd.memory import Mapping, map_memfd


class ProcessMemory(NamedTuple):
    """Memory that another process of this machine can open: a process id and a file descriptor of it."""

    pid: int
    fd: int


@contextmanager
def open_process_memory(place: ProcessMemory) -> Iterator[int]:
    """Give a file descriptor of the memory. Raises EngineError if this user may not open it."""
    try:
        fd = os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise EngineError(f"cannot open the memory of process {place.pid}: {error.strerror}") from error
    try:
        yield fd
    finally:
        os.close(fd)


def map_process_memory(place: ProcessMemory, size_bytes: int) -> Mapping:
    """Map the memory; the caller unmaps it. All implementations move between the same two regions."""
    with open_process_memory(place) as fd:
        return map_memfd(fd, size_bytes)
