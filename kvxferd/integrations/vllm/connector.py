"""The connector that vLLM loads: a thin front of the scheduler's side and the worker's side.

Loads start when a step's metadata arrives, before its forward pass: the blocks were never read or
zeroed for the request, and nothing of the step writes them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvxferd.integrations.vllm import sleep
from kvxferd.integrations.vllm.attachment import attach, attach_beside
from kvxferd.integrations.vllm.caches import derive
from kvxferd.integrations.vllm.enrolment import enrol
from kvxferd.integrations.vllm.groups import CacheGroups
from kvxferd.integrations.vllm.metrics import KvxferdPromMetrics, KvxferdStats
from kvxferd.integrations.vllm.options import read_options
from kvxferd.integrations.vllm.orders import Enrolled, Orders
from kvxferd.integrations.vllm.scheduler import SchedulerSide
from kvxferd.integrations.vllm.sharing import share
from kvxferd.integrations.vllm.worker import Results, WorkerSide

_LOG = init_logger("vllm.kvxferd")


@dataclass
class KvxferdMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A step's orders, from the scheduler to the workers."""

    orders: Orders


@dataclass
class KvxferdHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker is, said once at start."""

    enrolled: Enrolled


@dataclass
class KvxferdWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The same, said with the first step: inside MultiConnector the handshake may be another child's."""

    enrolled: Enrolled

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """All ranks say the same."""
        return self


class KvxferdConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM's cache moved by the kvxferd daemon of this node."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = read_options(self._kv_transfer_config.kv_connector_extra_config)
        self._groups = CacheGroups.of(vllm_config, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._told: Enrolled | None = None
        self._has_told = False
        self._ended = Results()
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                self._groups,
                self._options.num_readers,
                self._options.lease_s,
                may_pull=self._kv_transfer_config.is_kv_consumer,
            )

    # --- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register this rank's caches with the daemon. Blocks, at engine start."""
        derived = derive(kv_caches, self._kv_cache_config, self._vllm_config)
        devices = {storage.device for storage in derived.storages}
        sleep.check(self._vllm_config.model_config, devices, KVConnectorBase_V1)
        shared = share(derived, adopt=self._options.adopt_cpu_memory)
        for line in shared.report:
            _LOG.info("%s", line)
        self._worker, self._told = enrol(self._vllm_config, derived, shared, self._options)
        sleep.watch(self._worker, shared.renewed)

    def unregister_kv_caches(self) -> None:
        """Return once no other process maps this rank's caches. vLLM 0.33 asks for it before it sleeps."""
        sleep.fall_asleep()

    def restore_kv_caches(self) -> None:
        """Register them again. vLLM 0.33 asks for it after it woke."""
        sleep.wake_up(None)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return what the scheduler's side must know of the engine."""
        return None if self._told is None else KvxferdHandshake(self._told)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Carry out a step's orders, before its forward pass."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, KvxferdMetadata)
        if self._worker is not None and self._told is not None:
            self._worker.carry_out(connector_metadata.orders, says_ready=self._told.needs_ready)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: loads began when the metadata was bound."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is not scheduled before all its layers are here."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: the cache itself is what others read."""

    def wait_for_save(self) -> None:
        """Nothing: the cache itself is what others read."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return what ended since the last step, the failed among the received."""
        self._ended = self._worker.take_results() if self._worker is not None else Results()
        return KVConnectorTransferResults(
            finished_sending=self._ended.sent,
            finished_recving=self._ended.received,
            failed_recving=self._ended.failed,
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The same for engines that ask in two parts."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of failed pulls where a block id alone names a block."""
        return self._ended.bad_blocks

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Say once more what this engine is."""
        if self._has_told or self._told is None:
            return None
        self._has_told = True
        return KvxferdWorkerMetadata(self._told)

    # --- scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take what every worker, of every pipeline stage, has said. Raises ValueError."""
        enrolled = {said.enrolled for said in metadata.values() if isinstance(said, KvxferdHandshake)}
        if len(enrolled) > 1:
            raise ValueError(f"the workers of one engine are of several: {sorted(map(str, enrolled))}")
        for told in enrolled if self._waits_for_publisher else ():
            assert self._scheduler is not None
            self._scheduler.attach(attach(self._options, told), told.needs_ready)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """The same where nobody says pipeline ranks."""
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): said for rank, said in metadata.items()})

    def on_new_request(self, request: Any) -> None:
        """Prepare the request's pull."""
        assert self._scheduler is not None
        self._scheduler.request_added(request)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Every group that takes part in transfers is loaded: a request's own blocks travel."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """A pull restores recurrent state along with deeper attention, but nothing before its first token."""
        return not self._groups.has_window

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens are pulled, and that it happens beside the engine."""
        assert self._scheduler is not None
        count = self._scheduler.num_tokens_to_pull(request, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Order the pull into the request's blocks."""
        assert self._scheduler is not None
        self._scheduler.blocks_allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the step's orders."""
        assert self._scheduler is not None
        return KvxferdMetadata(self._scheduler.take_orders())

    def update_connector_output(self, connector_output: Any) -> None:
        """Take note of what ended on all workers."""
        assert self._scheduler is not None
        said = connector_output.kv_connector_worker_meta
        if isinstance(said, KvxferdWorkerMetadata) and self._waits_for_publisher:
            arriving = attach_beside(self._options, said.enrolled)
            self._scheduler.attach_when(arriving, said.enrolled.needs_ready)
        self._scheduler.pulls_ended(connector_output.finished_recving or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Publish a prefilled request, of an engine with one cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Publish a prefilled request; let go of one that was to be pulled."""
        assert self._scheduler is not None
        return self._scheduler.request_ended(request, block_ids)

    # --- both

    def get_kv_connector_stats(self) -> KvxferdStats | None:
        """Return what was counted since the last look."""
        side = self._worker or self._scheduler
        counted = None if side is None else side.tally.take()
        return None if counted is None else KvxferdStats(counted)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvxferdStats:
        """Return figures that travelled as plain data."""
        return KvxferdStats(copy.deepcopy(data))  # vLLM adds to what it gets, and shows the same to others

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvxferdPromMetrics:
        """Return the connector's metrics for vLLM's registry."""
        return KvxferdPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End the sessions: what is published is released, pulls fail."""
        if self._worker is not None:
            self._worker.close()
            sleep.forget(self._worker)
        if self._scheduler is not None:
            self._scheduler.close()

    @property
    def _waits_for_publisher(self) -> bool:
        assert self._scheduler is not None
        return self._kv_transfer_config.is_kv_producer and not self._scheduler.is_attached


# MultiConnector reads what its children counted in the server's process, and finds their classes there by
# name alone: a connector that is known by its module only ends the server with its first figures.
if KvxferdConnector.__name__ not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector(
        KvxferdConnector.__name__, "kvxferd.integrations.vllm", KvxferdConnector.__name__
    )
