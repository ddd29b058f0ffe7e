"""One side of a NIXL read between two processes: the source, or the reader, which checks every byte."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import time
from typing import Any, Literal, NamedTuple

import numpy as np

from kvxferd.ids import AgentName
from kvxferd.mover.backends import take_backend
from kvxferd.mover.transport.base import MemoryRange
from kvxferd.mover.transport.nixl import NixlTransport, import_library
from kvxferd.mover.transport.probe import tcp_bytes_received
from kvxferd.plan import Runs

NUM_READS = 4  # the first one connects


class ReadSource(NamedTuple):
    """What a reader needs of its source."""

    metadata: bytes
    address: int
    digest: str  # of the content


class ReadAgent:
    """A NIXL agent, once it is opened, and its memory."""

    def __init__(self) -> None:
        self._is_source = False

    def open_source(self, size_bytes: int, library: str) -> ReadSource:
        """Make the agent of a source. From here on it serves reads between calls."""
        self._open("source", size_bytes, library)
        self._memory[:] = os.urandom(1 << 16) * (size_bytes >> 16)
        self._is_source = True
        return ReadSource(self._transport.metadata([self._span]), self._span.address, self._digest())

    def progress(self) -> bool:
        """Serve reads; return False if this is no source."""
        if self._is_source:
            self._transport.progress()
        return self._is_source

    def read(self, size_bytes: int, library: str, source: ReadSource) -> dict[str, Any]:
        """Make the agent of a reader, read a few times, and return what was found, for machines."""
        self._open("reader", size_bytes, library)
        transport, span = self._transport, self._span
        agent = transport.load_remote(source.metadata)
        columns = (span.address, source.address, span.size_bytes)
        runs = Runs(*(np.array([value], dtype=np.uint64) for value in columns))
        times, before = [], tcp_bytes_received()
        for _ in range(NUM_READS):
            self._memory[:64] = bytes(64)
            began = time.perf_counter()
            handle = transport.post(agent, runs)
            while not transport.poll(handle):
                pass
            times.append(time.perf_counter() - began)
            transport.release(handle)
        over_tcp = tcp_bytes_received() - before >= span.size_bytes
        return {
            "intact": self._digest() == source.digest,
            "over_tcp": over_tcp,
            "first_s": times[0],
            "gigabytes_per_s": span.size_bytes / min(times[1:]) / 1e9,
            "library": transport.library,
            "plugins": self._library.plugins(),
            "parameters": self._parameters,
        }

    def _open(self, role: Literal["source", "reader"], size_bytes: int, library: str) -> None:
        self._library = import_library(library)
        backend = take_backend(os.environ)
        self._parameters = self._library.plugin_parameters(backend)
        self._transport = NixlTransport(self._library, AgentName(f"doctor/{role}-{os.getpid()}"), backend)
        self._memory = mmap.mmap(-1, size_bytes)
        self._span = MemoryRange(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)), size_bytes)
        self._transport.register(self._span)

    def _digest(self) -> str:
        return hashlib.sha256(self._memory[:]).hexdigest()
