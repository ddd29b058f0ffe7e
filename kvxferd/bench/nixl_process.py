"""A plain process with a NIXL agent: source or sink of a baseline.

`python -m kvxferd.bench.nixl_process raw|engine` handles commands from standard input until it is
closed.
"""

from __future__ import annotations

import base64
import os
import sys
import uuid
from typing import Any

from kvxferd.bench import engine_nixl, protocol, raw_nixl
from kvxferd.bench.read_loop import SlotReader, run_reads
from kvxferd.bench.shapes import BenchDeployment
from kvxferd.bench.shared_memory import map_process_memory
from kvxferd.errors import KvxferdError
from kvxferd.memory import Mapping
from kvxferd.mover.shm import make_shm_directory, remove_shm_directory
from kvxferd.mover.transport.nixl import import_library
from kvxferd.tooling.command_loop import serve_commands

_CONFIGS = {"raw": raw_nixl.agent_config, "engine": engine_nixl.agent_config}


class NixlCommandHandler:
    """An agent, the memory that it has registered, and the agent that it reads from."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        make_shm_directory()
        api = import_library("auto").api
        self._nixl: Any = api.nixl_agent(f"bench-{kind}-{uuid.uuid4()}", _CONFIGS[kind](api))
        self._memory: Mapping | None = None
        self._registered: Any = None
        self._deployment: BenchDeployment | None = None
        self._remote = ""
        self._reader: SlotReader | None = None
        self._is_polling = False

    def handle(self, command: protocol.Command) -> protocol.Reply:
        """Handle one command."""
        match command:
            case protocol.AttachMemory():
                return self._attach(command)
            case protocol.AddRemote():
                return self._add_remote(command)
            case protocol.Move():
                assert self._reader is not None
                return protocol.Moved(
                    samples=run_reads(self._reader, command.case, command.count, command.window)
                )
            case protocol.SetManualPolling():
                self._is_polling = command.on
                return protocol.CommandDone()
            case _:
                raise KvxferdError(f"cannot handle {type(command).__name__}: this is a NIXL agent")

    def progress(self) -> bool:
        """Poll for readers; return False if there are none to serve."""
        if self._is_polling:
            self._nixl.get_new_notifs()
        return self._is_polling

    def close(self) -> None:
        """Release the memory and end the process, which ends the agent."""
        remove_shm_directory(os.getpid())

    def _attach(self, command: protocol.AttachMemory) -> protocol.MemoryAttached:
        self._release_memory()
        size_bytes = command.deployment.region_bytes
        self._memory = map_process_memory(command.memory, size_bytes)
        span = [(self._memory.address, size_bytes, 0, "")]
        self._registered = self._nixl.register_memory(span, "DRAM")
        self._deployment = command.deployment
        metadata = base64.b64encode(self._nixl.get_agent_metadata()).decode()
        return protocol.MemoryAttached(metadata=metadata, address=self._memory.address)

    def _add_remote(self, command: protocol.AddRemote) -> protocol.CommandDone:
        if self._remote:
            # The metadata is loaded anew, so that the agent keeps nothing of memory that is gone.
            self._nixl.remove_remote_agent(self._remote)
        name = self._nixl.add_remote_agent(base64.b64decode(command.metadata))
        self._remote = name.decode() if isinstance(name, bytes) else name
        assert self._memory is not None and self._deployment is not None
        bases = self._memory.address, command.address
        if self._kind == "raw":
            self._reader = raw_nixl.RawNixlReader(self._nixl, self._remote, *bases)
        else:
            self._reader = engine_nixl.EngineNixlReader(self._nixl, self._remote, *bases, self._deployment)
        return protocol.CommandDone()

    def _release_memory(self) -> None:
        if isinstance(self._reader, engine_nixl.EngineNixlReader):
            self._reader.close()
        self._reader = None
        if self._registered is not None:
            self._nixl.deregister_memory(self._registered)
        if self._memory is not None:
            self._memory.unmap()


if __name__ == "__main__":
    serve_commands(protocol.PROTOCOL, lambda: NixlCommandHandler(sys.argv[1]))
    # The library's threads may still run, and nothing here needs an orderly end.
    os._exit(0)
