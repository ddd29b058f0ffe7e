"""One NIXL read between two processes.

Each is `python -m kvxferd.doctor.nixl_read_process source|reader SIZE LIBRARY BACKEND`.

The source prints what a reader needs, and serves until its standard input ends. The reader takes that line
from standard input, reads a few times, checks every byte, and prints the result.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import select
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from kvxferd.mover.transport.base import MemoryRange, Transport

NUM_READS = 4  # the first one connects


def main() -> None:
    """Run as source or as reader. Ends the process.

    Arguments: role, size in bytes, library ("auto", "nixl", "rixl").
    """
    role, size = sys.argv[1], int(sys.argv[2])
    # The libraries log to standard output, which is for the result.
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from kvxferd.ids import AgentName
    from kvxferd.mover.backends import take_backend
    from kvxferd.mover.transport.base import MemoryRange
    from kvxferd.mover.transport.nixl import NixlTransport, import_library

    library = import_library(sys.argv[3])
    backend = take_backend(os.environ)
    parameters = library.plugin_parameters(backend)
    transport = NixlTransport(library, AgentName(f"doctor/{role}-{os.getpid()}"), backend)
    memory = mmap.mmap(-1, size)
    span = MemoryRange(ctypes.addressof(ctypes.c_char.from_buffer(memory)), size)
    transport.register(span)
    if role == "source":
        memory[:] = os.urandom(1 << 16) * (size >> 16)
        _print_json(_describe_memory(transport, span, memory), reply)
        poller = select.poll()
        poller.register(0, select.POLLIN)
        while not poller.poll(0):
            transport.progress()
    else:
        found = _read_and_verify(transport, span, memory, json.loads(sys.stdin.readline()))
        _print_json({**found, "plugins": library.plugins(), "parameters": parameters}, reply)
    os._exit(0)  # the library's destructors could hang, and are not needed


def _print_json(value: dict[str, Any], reply: TextIO) -> None:
    print(json.dumps(value), file=reply, flush=True)


def _describe_memory(transport: Transport, span: MemoryRange, memory: mmap.mmap) -> dict[str, Any]:
    return {
        "metadata": transport.metadata([span]).hex(),
        "address": span.address,
        "digest": hashlib.sha256(memory[:]).hexdigest(),
    }


def _read_and_verify(
    transport: Transport, span: MemoryRange, memory: mmap.mmap, source: dict[str, Any]
) -> dict[str, Any]:
    import numpy as np

    from kvxferd.mover.transport.probe import tcp_bytes_received
    from kvxferd.plan import Runs

    agent = transport.load_remote(bytes.fromhex(source["metadata"]))
    columns = (span.address, source["address"], span.size_bytes)
    runs = Runs(*(np.array([value], dtype=np.uint64) for value in columns))
    times, before = [], tcp_bytes_received()
    for _ in range(NUM_READS):
        memory[:64] = bytes(64)
        began = time.perf_counter()
        handle = transport.post(agent, runs)
        while not transport.poll(handle):
            pass
        times.append(time.perf_counter() - began)
        transport.release(handle)
    over_tcp = tcp_bytes_received() - before >= span.size_bytes
    return {
        "intact": hashlib.sha256(memory[:]).hexdigest() == source["digest"],
        "over_tcp": over_tcp,
        "first_s": times[0],
        "gigabytes_per_s": span.size_bytes / min(times[1:]) / 1e9,
        "library": transport.library,
    }


if __name__ == "__main__":
    main()
