"""The worker protocol spoken by hand, as attacks begin with it."""

from __future__ import annotations

from typing import Any

from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.memory import SealedMemory
from tests.support.raw_worker import RawWorker

FACTS: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 16, "block_tokens": 16, "num_blocks": 16}


class WorkerByHand(RawWorker):
    """A connection to a worker socket that says whatever an attack wants."""

    def be_rank(
        self, name: str, memory: SealedMemory | None = None, generation: str = "g1", **more: Any
    ) -> Any:
        """Be the one rank of an engine of that name. Returns the answer; `more`: as of `register`."""
        spec = EngineSpec(engine_id=name, generation=generation, num_layers=2, num_kv_heads=2)
        layout = attention_layout(spec=spec, **FACTS)
        if memory is not None:
            return self.register(spec, layout, memory.fd, **more)
        with SealedMemory.create(layout.regions[0].size_bytes, "by-hand") as own:
            return self.register(spec, layout, own.fd, **more)
