"""A rank's memory, shared and registered with the first placement that works."""

from __future__ import annotations

import logging
import time

from kvxferd.client import RankHandle
from kvxferd.errors import Code, DeviceError, EngineError, KvxferdError
from kvxferd.integrations.vllm.layout.derivation import DerivedCaches
from kvxferd.integrations.vllm.memory.gpu_placement import GpuPlacement, PlacementSearch
from kvxferd.integrations.vllm.memory.memory_sharing import SharedCaches, register_rank, share_memory
from kvxferd.integrations.vllm.options import Options, connect_to_daemon
from kvxferd.layout import EngineSpec

_LOG = logging.getLogger("vllm.kvxferd")


class RankSharing:
    """One rank's memory, from its allocations to its registration. Used by one thread, at engine start."""

    def __init__(self, derived: DerivedCaches, options: Options, search: PlacementSearch | None) -> None:
        """Share the memory. `search`: the placements of a cache in GPU memory; None: it lies on the host.

        Raises EngineError where no placement's part can be done in this process.
        """
        self._derived = derived
        self._options = options
        self._search = search
        self.shared = self._share()

    def register(self, spec: EngineSpec, deadline: float) -> RankHandle:
        """Register the rank by `deadline` (monotonic seconds). Blocks.

        Where the daemon, or this environment, refuses the placement, the memory is shared with the next one
        and registered again. Raises KvxferdError.
        """
        while True:
            try:
                rank = self._register_with_retries(spec, deadline)
            except KvxferdError as error:
                if self._search is None:
                    raise
                self._search.fail(error)
                self.shared.close()
                self.shared = self._share()
                continue
            if self._search is not None:
                _LOG.info("%s", self._search.report())
            return rank

    def _share(self) -> SharedCaches:
        while True:
            placement = GpuPlacement.EXPORTED if self._search is None else self._search.current
            try:
                shared = share_memory(self._derived, placement, adopt=self._options.adopt_cpu_memory)
            except DeviceError as error:
                if self._search is None:
                    raise
                self._search.fail(error)
                continue
            for line in shared.report:
                _LOG.info("%s", line)
            return shared

    def _register_with_retries(self, spec: EngineSpec, deadline: float) -> RankHandle:
        name = f"vllm {spec.engine_id} ({spec.pp_rank}, {spec.tp_rank})"
        connection = connect_to_daemon(self._options, name, deadline)
        while True:
            try:
                left = max(1.0, deadline - time.monotonic())
                return register_rank(connection, spec, self._derived.layout, self.shared, left)
            except EngineError as error:
                if error.code is not Code.BUSY or time.monotonic() + error.retry_after_s > deadline:
                    connection.close()
                    raise
                time.sleep(error.retry_after_s or 0.1)  # engine start: nothing else waits for this thread
            except BaseException:
                connection.close()
                raise
