"""A process that owns a NIXL agent and is read: commands as JSON lines, answers likewise."""

from __future__ import annotations

import json
import select
import sys

from kvxferd.ids import AgentName
from kvxferd.memory import Mapping, SealedMemory, map_memfd
from kvxferd.mover.transport.base import MemoryRange
from kvxferd.mover.transport.nixl import NixlTransport, import_library


def main() -> None:
    transport = NixlTransport(import_library(), AgentName(sys.argv[1]))
    kept: dict[int, tuple[SealedMemory, Mapping]] = {}
    print(json.dumps("ready"), flush=True)
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], 0.0002)
        if not readable:
            transport.progress()
            continue
        line = sys.stdin.readline()
        if not line:
            return
        command = json.loads(line)
        reply: object = None
        match command["do"]:
            case "allocate":
                memory = SealedMemory.create(command["size"])
                mapping = map_memfd(memory.fd, command["size"])
                kept[mapping.address] = (memory, mapping)
                transport.register(MemoryRange(mapping.address, command["size"], "DRAM", command["device"]))
                reply = mapping.address
            case "describe":
                reply = transport.metadata([MemoryRange(*span) for span in command["spans"]]).hex()
            case "tell":
                to = transport.load_remote(bytes.fromhex(command["metadata"]))
                transport.notify(to, bytes.fromhex(command["note"]))
            case "heard":
                reply = [(agent, note.hex()) for agent, note in transport.receive_notifications()]
            case "write":
                _, mapping = kept[command["address"]]
                content = bytes.fromhex(command["content"])
                mapping.view()[command["offset"] : command["offset"] + len(content)] = content
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
