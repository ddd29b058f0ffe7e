"""Reads cudaMalloc's memory of another process: `python -m tests.proofs.cuda_stub.plain_read source|reader`.

The source prints what a reader needs, and serves until its standard input ends. The reader takes that line
from standard input, and prints "intact" where every byte came. At the next line, or the end, it drops the
source, and prints by how many bytes less of the device are in use than while it read.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys

from kvxferd.ids import AgentName
from kvxferd.memory.driver_registry import open_driver
from kvxferd.mover.transport.base import MemoryKind, MemoryRange, ReadKinds
from kvxferd.mover.transport.nixl import NixlTransport, import_library
from kvxferd.mover.transport.runs import single_run
from tests.support.devices import read, used_bytes, write

SIZE_BYTES = 4 << 20


def main() -> None:
    role, output = sys.argv[1], os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the libraries log to standard output
    transport = NixlTransport(import_library(), AgentName(f"{role}/1"))
    driver = open_driver("cuda")
    device = driver.devices()[0]
    address = driver.allocate_plain(device.uuid, SIZE_BYTES)
    span = MemoryRange(address, SIZE_BYTES, driver.mem_type, device.ordinal)
    transport.register(span)
    content = random.Random(1).randbytes(SIZE_BYTES)
    if role == "source":
        write(driver, address, content)
        print(json.dumps([transport.metadata([span]).hex(), address]), file=output, flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:
            transport.progress()
    else:
        metadata, remote = json.loads(sys.stdin.readline())
        place = MemoryKind(driver.mem_type, device.ordinal)
        agent = transport.load_remote(bytes.fromhex(metadata))
        handle = transport.post(agent, single_run(address, remote, SIZE_BYTES), ReadKinds(place, place))
        while not transport.poll(handle):
            pass
        transport.release(handle)
        used = used_bytes(driver, device.uuid)
        print(
            "intact" if read(driver, address, SIZE_BYTES) == content else "other bytes",
            file=output,
            flush=True,
        )
        sys.stdin.readline()
        transport.drop_remote(agent)
        transport.progress()
        print(used - used_bytes(driver, device.uuid), file=output, flush=True)
    os._exit(0)  # the libraries' destructors could hang, and are not needed


if __name__ == "__main__":
    main()
