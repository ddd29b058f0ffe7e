"""The connector that vLLM loads. It passes vLLM's calls to `ConnectorScheduler` and `ConnectorWorker`.

Loads start when a step's metadata arrives, before its forward pass: vLLM has not read or zeroed the
blocks for the request, and nothing in the step writes them.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import vllm
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvxferd.client import connect
from kvxferd.integrations.vllm.identity import start_generation
from kvxferd.integrations.vllm.layout.groups import CacheGroups
from kvxferd.integrations.vllm.layout.support import version_of_opaque_caches, version_warning
from kvxferd.integrations.vllm.memory.cache_pool import PoolOffer, offer_pool
from kvxferd.integrations.vllm.metrics import KvxferdPromMetrics, KvxferdStats
from kvxferd.integrations.vllm.options import read_options
from kvxferd.integrations.vllm.registration import derive_caches, register_caches
from kvxferd.integrations.vllm.session import sleep
from kvxferd.integrations.vllm.session.early_pulls import EarlyPullLimits
from kvxferd.integrations.vllm.session.scheduler import ConnectorScheduler
from kvxferd.integrations.vllm.session.step_metadata import StepMetadata
from kvxferd.integrations.vllm.session.worker import ConnectorWorker, Results

_LOG = init_logger("vllm.kvxferd")


@dataclass
class KvxferdMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's metadata, from the scheduler to the workers."""

    step: StepMetadata


class KvxferdConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM's KV connector over the kvxferd daemon of this node.

    vLLM's scheduler and each worker make one, and call it in one thread. Settings are the keys of
    ``kv_connector_extra_config`` (`options.Options`). Construction raises EngineError (config-invalid)
    for a wrong one. A transfer that fails raises nothing: vLLM recomputes the request.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = read_options(self._kv_transfer_config.kv_connector_extra_config)
        if (warning := version_warning(vllm.__version__)) is not None:
            _LOG.warning("%s", warning)
        self._groups = CacheGroups.from_vllm(vllm_config, kv_cache_config)
        self._scheduler: ConnectorScheduler | None = None
        self._worker: ConnectorWorker | None = None
        self._pool_offer = PoolOffer()
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = ConnectorScheduler(
                self._groups,
                self._options.num_readers,
                self._options.lease_s,
                may_pull=self._kv_transfer_config.is_kv_consumer,
                early=self._early_pull_limits(),
            )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the layout that vLLM should give the cache, if the attention backend takes it; None: any.

        VLLM_KV_CACHE_LAYOUT precedes it. vLLM asks once, before there is a cache; MultiConnector asks each
        child, and refuses children that name different ones: beside a child that asks for another layout,
        set ``"kv_cache_layout": "engine"``, which asks for none. Raises EngineError (config-invalid) for a
        wrong option.
        """
        options = read_options(vllm_config.kv_transfer_config.kv_connector_extra_config)
        model = vllm_config.model_config
        return options.preferred_layout(has_latents=model is not None and model.use_mla)

    # --- worker

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """Return the context in which vLLM allocates this worker's cache, so that it can be exported.

        None: vLLM allocates as it does without a connector, and the cache's mover will be a thread here.
        """
        self._pool_offer = offer_pool(self._options.placement, is_child=is_child_connector(self))
        if self._pool_offer.failure is not None:
            _LOG.info("the cache is not allocated in a pool of kvxferd: %s", self._pool_offer.failure)
        return None if self._pool_offer.pool is None else self._pool_offer.pool.context()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register this rank's caches, tensors by layer name, with the daemon. Blocks, at engine start.

        Raises LayoutError, naming the layer, for a cache that is not supported, and KvxferdError where the
        daemon does not accept the rank within ``connect_timeout_s``, or no placement works.
        """
        version = version_of_opaque_caches(self._options.opaque_cache_version, vllm.__version__)
        derived = derive_caches(kv_caches, self._kv_cache_config, self._vllm_config, version)
        devices = {storage.device for storage in derived.storages}
        sleep.check_backend(self._vllm_config.model_config, devices, KVConnectorBase_V1)
        self._worker = register_caches(self._vllm_config, derived, self._options, self._pool_offer.failure)
        sleep.add_worker(self._worker, derived.storages, self._pool_offer.pool)

    def unregister_kv_caches(self) -> None:
        """Return once no other process maps this rank's caches. vLLM 0.33 calls it before it sleeps.

        Raises KvxferdError (deadline) if that takes longer than 60 s.
        """
        sleep.suspend_workers()

    def restore_kv_caches(self) -> None:
        """Register the caches again. vLLM 0.33 calls it after it wakes."""
        sleep.resume_workers(None)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start what the scheduler decided for a step, before its forward pass."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, KvxferdMetadata)
        if self._worker is not None:
            self._worker.start_step(connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: loads began when the metadata was bound."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is not scheduled before all its layers have arrived."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: others read the cache itself."""

    def wait_for_save(self) -> None:
        """Do nothing: others read the cache itself."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose transfers ended since the last step. Failed ones are also received."""
        results = self._worker.collect_results() if self._worker is not None else Results()
        return KVConnectorTransferResults(
            finished_sending=results.sent, finished_recving=results.received, failed_recving=results.failed
        )

    # --- scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Become the publisher of this engine: all workers are registered by now. Raises KvxferdError.

        The metadata is empty, or another child's inside MultiConnector: this connector's workers send none.
        """
        assert self._scheduler is not None
        if self._kv_transfer_config.is_kv_producer and self._scheduler.publishing.publisher is None:
            engine_id, options = self._kv_transfer_config.engine_id, self._options
            connection = connect(
                options.socket, timeout_s=options.connect_timeout_s, name=f"vllm {engine_id} scheduler"
            )
            try:
                publisher = connection.attach(engine_id, start_generation(self._vllm_config))
            except BaseException:
                connection.close()
                raise
            self._scheduler.publishing.publisher = publisher

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Do the same for a vLLM that passes no pipeline ranks."""
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): sent for rank, sent in metadata.items()})

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Take vLLM's cache manager, without which no request is published before it ends."""
        super().bind_kv_cache_manager(kv_cache_manager)
        assert self._scheduler is not None
        if self._options.progressive:
            self._scheduler.publishing.cache = kv_cache_manager

    def has_pending_block_frees(self) -> bool:
        """Whether blocks of requests that vLLM has preempted come free once nobody reads them."""
        return self._scheduler is not None and self._scheduler.publishing.has_pending_frees()

    def on_new_request(self, request: Any) -> None:
        """Prepare the request's pull."""
        assert self._scheduler is not None
        self._scheduler.request_added(request)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Return every group that takes part in transfers: all of a request's blocks are pulled."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether groups may have local hits of unequal length.

        A pull restores recurrent state along with deeper attention, but nothing before its first token.
        """
        return not self._groups.has_window

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens are pulled beyond those computed, and whether that is asynchronous."""
        assert self._scheduler is not None
        count = self._scheduler.num_tokens_to_pull(request, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Start the pull into the request's blocks with the next step."""
        assert self._scheduler is not None
        self._scheduler.blocks_allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the step's metadata."""
        assert self._scheduler is not None
        step = self._scheduler.build_step_metadata(
            scheduler_output.num_scheduled_tokens, scheduler_output.preempted_req_ids or ()
        )
        return KvxferdMetadata(step)

    def update_connector_output(self, connector_output: Any) -> None:
        """Record the transfers that ended on all workers."""
        assert self._scheduler is not None
        self._scheduler.pulls_ended(connector_output.finished_recving or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Do the same for an engine with one cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Publish a prefilled request, or abandon the transfer of one that was not pulled.

        Returns whether vLLM keeps the blocks until `get_transfer_results` reports the request as sent,
        and the parameters that the router passes to the decode engine.
        """
        assert self._scheduler is not None
        return self._scheduler.request_ended(request, block_ids)

    # --- both

    def get_kv_connector_stats(self) -> KvxferdStats | None:
        """Return what was counted since the last call; None where nothing was."""
        side = self._worker or self._scheduler
        counted = None if side is None else side.stats.collect()
        return None if counted is None else KvxferdStats(counted)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvxferdStats:
        """Return stats from the plain data that another process sent."""
        return KvxferdStats(copy.deepcopy(data))  # vLLM adds to the object, and passes `data` to others too

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
            sleep.remove_worker(self._worker)
        if self._scheduler is not None:
            self._scheduler.publishing.close()

    def _early_pull_limits(self) -> EarlyPullLimits | None:
        options = self._options
        if not options.progressive:
            return None
        num_blocks = int(options.progressive_blocks * self._kv_cache_config.num_blocks)
        return EarlyPullLimits(options.progressive_requests, num_blocks)


def is_child_connector(connector: KvxferdConnector) -> bool:
    """Whether this worker's connector, the one that vLLM made and calls, is another: a MultiConnector."""
    return has_kv_transfer_group() and get_kv_transfer_group() is not connector


# MultiConnector reads its children's stats in the server's process, and looks their classes up by name
# alone: a connector that is registered by its module only crashes the server with its first stats.
if KvxferdConnector.__name__ not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector(
        KvxferdConnector.__name__, "kvxferd.integrations.vllm", KvxferdConnector.__name__
    )
