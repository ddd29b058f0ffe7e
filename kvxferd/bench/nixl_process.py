"""A NIXL agent in a plain process: source or sink of a baseline."""

from __future__ import annotations

import uuid
from typing import Any, Literal, NamedTuple

from kvxferd.bench import engine_nixl, raw_nixl
from kvxferd.bench.cases import Case
from kvxferd.bench.read_loop import SlotReader, run_reads
from kvxferd.bench.samples import Sample
from kvxferd.bench.shapes import BenchDeployment
from kvxferd.bench.shared_memory import ProcessMemory, map_process_memory
from kvxferd.memory import Mapping
from kvxferd.mover.shm import make_shm_directory
from kvxferd.mover.transport.nixl import import_library

AgentKind = Literal["raw", "engine"]

_CONFIGS = {"raw": raw_nixl.agent_config, "engine": engine_nixl.agent_config}


class AttachedMemory(NamedTuple):
    """What a reader needs of the source's memory."""

    metadata: bytes
    address: int


class NixlAgent:
    """An agent, the memory that it has registered, and the agent that it reads from."""

    def __init__(self, kind: AgentKind) -> None:
        """Who ends the process removes its directory in /dev/shm."""
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

    def progress(self) -> bool:
        """Poll for readers; return False if there are none to serve."""
        if self._is_polling:
            self._nixl.get_new_notifs()
        return self._is_polling

    def set_polling(self, is_polling: bool) -> None:
        """Poll by hand between calls, so that others can read from this process, or no longer."""
        self._is_polling = is_polling

    def attach(self, deployment: BenchDeployment, memory: ProcessMemory) -> AttachedMemory:
        """Register the memory of a rank in place of the previous one."""
        self._release_memory()
        size_bytes = deployment.region_bytes
        self._memory = map_process_memory(memory, size_bytes)
        span = [(self._memory.address, size_bytes, 0, "")]
        self._registered = self._nixl.register_memory(span, "DRAM")
        self._deployment = deployment
        return AttachedMemory(self._nixl.get_agent_metadata(), self._memory.address)

    def add_remote(self, source: AttachedMemory) -> None:
        """Read from that memory from now on."""
        if self._remote:
            # The metadata is loaded anew, so that the agent keeps nothing of memory that is gone.
            self._nixl.remove_remote_agent(self._remote)
        name = self._nixl.add_remote_agent(source.metadata)
        self._remote = name.decode() if isinstance(name, bytes) else name
        assert self._memory is not None and self._deployment is not None
        bases = self._memory.address, source.address
        if self._kind == "raw":
            self._reader = raw_nixl.RawNixlReader(self._nixl, self._remote, *bases)
        else:
            self._reader = engine_nixl.EngineNixlReader(self._nixl, self._remote, *bases, self._deployment)

    def move(self, case: Case, count: int, window: int) -> list[Sample]:
        """Move `count` requests of the case, at most `window` at a time."""
        assert self._reader is not None
        return run_reads(self._reader, case, count, window)

    def _release_memory(self) -> None:
        if isinstance(self._reader, engine_nixl.EngineNixlReader):
            self._reader.close()
        self._reader = None
        if self._registered is not None:
            self._nixl.deregister_memory(self._registered)
        if self._memory is not None:
            self._memory.unmap()
