"""Timed reads through NIXL between two processes of this user, every byte compared."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
import time
from typing import Any, Literal, NamedTuple

import numpy as np

from kvxferd.doctor.isolated import call_isolated, isolated
from kvxferd.doctor.report import CheckContext
from kvxferd.errors import KvxferdError
from kvxferd.ids import AgentName
from kvxferd.mover.backends import Backend, backend_environment, take_backend
from kvxferd.mover.transport.base import MemoryRange
from kvxferd.mover.transport.nixl import NixlTransport, import_library
from kvxferd.mover.transport.probe import tcp_bytes_received
from kvxferd.mover.ucx_settings import tls_with_cuda
from kvxferd.plan import Runs
from kvxferd.ucx_log import ITSELF, NODE, data_transports, parse_line, parse_transports

SIZE_BYTES = 16 << 20
NUM_READS = 4  # the first one connects
READ_TIMEOUT_S = 30.0  # a cold import on a busy machine


class ReadResult(NamedTuple):
    """The result of a read between two processes."""

    value: dict[str, Any]  # of `ReadAgent.read`; {}: the read failed
    failure: str
    ucx_version: str  # UCX's version; "": unknown
    loopback_transports: str  # the data transports to the same process
    node_transports: str  # and those to the other process

    @property
    def speed(self) -> str:
        """The speed of a read that did not fail."""
        return f"{self.value['gigabytes_per_s']:.3g} GB/s"


def read_between(node: CheckContext, transports: str = "") -> ReadResult:
    """Return the result of a read, which is made once for each set of transports.

    `transports`: UCX's names of those to use; "": as movers choose.
    """
    environment = dict(node.environment)
    if transports:
        environment["UCX_TLS"] = tls_with_cuda(transports)
    mover = node.config.mover
    environment |= backend_environment(Backend(mover.backend, mover.backend_parameters))
    return _read_cached(tuple(sorted(environment.items())), mover.library)


@functools.cache
def _read_cached(variables: tuple[tuple[str, str], ...], library: str) -> ReadResult:
    environment = {"UCX_LOG_LEVEL": "info", **dict(variables)}
    value: dict[str, Any] = {}
    failure = ""
    with isolated(ReadAgent, environment) as reader, isolated(ReadAgent, environment) as source:
        try:
            span = call_isolated(source, READ_TIMEOUT_S, ReadAgent.open_source, library)
            value = call_isolated(reader, READ_TIMEOUT_S, ReadAgent.read, library, span)
        except KvxferdError as error:
            failure = error.message
        log = "\n".join(process.log.read_text(errors="replace") for process in (reader, source))
    lanes, version = _parse_ucx_log(log)
    return ReadResult(value, failure, version, lanes[ITSELF], lanes[NODE])


def _parse_ucx_log(log: str) -> tuple[dict[str, str], str]:
    """Return the transports that UCX chose, by reach, and its version."""
    lanes, version = {ITSELF: "", NODE: ""}, ""
    for line in filter(None, map(parse_line, log.splitlines())):
        if line.text.startswith("Version "):
            version = line.text.split()[1]
        if (connected := parse_transports(line.text)) is not None:
            lanes[connected.reach] = lanes.get(connected.reach) or data_transports(connected.transports)
    return lanes, version


class ReadSource(NamedTuple):
    """What a reader needs of its source."""

    metadata: bytes
    address: int
    digest: str  # of the content


class ReadAgent:
    """One of the two processes: a NIXL agent, once it is opened, and its memory."""

    def __init__(self) -> None:
        self._is_source = False

    def open_source(self, library: str) -> ReadSource:
        """Make the agent of a source. From here on it serves reads between calls."""
        self._open("source", library)
        self._memory[:] = os.urandom(1 << 16) * (SIZE_BYTES >> 16)
        self._is_source = True
        return ReadSource(self._transport.metadata([self._span]), self._span.address, self._digest())

    def progress(self) -> bool:
        """Serve reads; return False if this is no source."""
        if self._is_source:
            self._transport.progress()
        return self._is_source

    def read(self, library: str, source: ReadSource) -> dict[str, Any]:
        """Make the agent of a reader, read a few times, and return what was found, for machines."""
        self._open("reader", library)
        transport = self._transport
        agent = transport.load_remote(source.metadata)
        columns = (self._span.address, source.address, SIZE_BYTES)
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
        return {
            "intact": self._digest() == source.digest,
            "over_tcp": tcp_bytes_received() - before >= SIZE_BYTES,
            "first_s": times[0],
            "gigabytes_per_s": SIZE_BYTES / min(times[1:]) / 1e9,
            "library": transport.library,
            "plugins": self._library.plugins(),
            "parameters": self._parameters,
        }

    def _open(self, role: Literal["source", "reader"], library: str) -> None:
        self._library = import_library(library)
        backend = take_backend(os.environ)
        self._parameters = self._library.plugin_parameters(backend)
        self._transport = NixlTransport(self._library, AgentName(f"doctor/{role}-{os.getpid()}"), backend)
        self._memory = mmap.mmap(-1, SIZE_BYTES)
        self._span = MemoryRange(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)), SIZE_BYTES)
        self._transport.register(self._span)

    def _digest(self) -> str:
        return hashlib.sha256(self._memory[:]).hexdigest()
