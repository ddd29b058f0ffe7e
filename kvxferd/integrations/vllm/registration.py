"""Describe a worker's cache and register it as a rank with the daemon of its node."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from kvxferd import client
from kvxferd.client.gpu_events import Completion
from kvxferd.errors import Code, EngineError
from kvxferd.integrations.vllm import vllm_specs
from kvxferd.integrations.vllm.generation import agree_on_generation, start_tag
from kvxferd.integrations.vllm.groups import CacheGroups
from kvxferd.integrations.vllm.identity import engine_spec
from kvxferd.integrations.vllm.layout_derivation import DerivedCaches, derive_layout
from kvxferd.integrations.vllm.memory_sharing import SharedCaches, register_rank
from kvxferd.integrations.vllm.options import Options, home_of
from kvxferd.integrations.vllm.publisher_session import connect_to_daemon
from kvxferd.integrations.vllm.step_metadata import RegisteredEngine
from kvxferd.integrations.vllm.worker import ConnectorWorker

_LOG = logging.getLogger("vllm.kvxferd")


def derive_caches(kv_caches: Mapping[str, Any], kv_cache_config: Any, vllm_config: Any) -> DerivedCaches:
    """Return the layout of this worker's rank, with its allocations. `kv_caches` is by layer name.

    Raises LayoutError, naming the layer or group that it cannot describe, and why.
    """
    tp_rank, pp_rank, stage = vllm_specs.read_position(vllm_config)
    layers = vllm_specs.read_layers(
        kv_cache_config,
        vllm_config,
        is_conv_dim_first=vllm_specs.conv_state_is_dim_first(),
        fp8_dtype=vllm_specs.platform_fp8_dtype(),
    )
    worker = vllm_specs.read_worker(
        vllm_config, kv_cache_config, tp_rank=tp_rank, pp_rank=pp_rank, stage=stage
    )
    return derive_layout(kv_caches, layers, CacheGroups.from_vllm(vllm_config, kv_cache_config), worker)


def register_caches(
    vllm_config: Any, derived: DerivedCaches, shared: SharedCaches, options: Options
) -> tuple[ConnectorWorker, RegisteredEngine]:
    """Register this worker's caches. Blocks, at engine start. Raises KvxferdError.

    Every worker of the engine must call this, because they agree on the generation together. Returns the
    rank's side of the connector, and the engine as the scheduler needs it.
    """
    # vLLM returns a step's tokens while the draft of that step still writes its own layers.
    is_ahead = vllm_specs.draft_model(vllm_config) is not None and any(
        s.device != "cpu" for s in derived.storages
    )
    generation, needs_ready = agree_on_generation(
        start_tag(vllm_config), shared.bounce_buffers is not None or is_ahead
    )
    spec = engine_spec(
        vllm_config,
        generation=generation,
        home=home_of(options),
        fingerprint=options.model_fingerprint,
        publish_implies_ready=not needs_ready,
    )
    began = time.monotonic()
    rank = _register_with_retries(options, spec, derived, shared, began + options.connect_timeout_s)
    _LOG.info(
        "rank (%d, %d) of %s@%s is registered at %s: %d layers, %.1f MiB, %.3f s",
        spec.pp_rank,
        spec.tp_rank,
        spec.engine_id,
        spec.generation,
        options.socket,
        derived.layout.end_layer - derived.layout.start_layer,
        sum(region.size_bytes for region in derived.layout.regions) / 2**20,
        time.monotonic() - began,
    )
    worker = ConnectorWorker(
        rank,
        options.pull_deadline_s,
        is_lead_rank=(spec.pp_rank, spec.tp_rank) == (0, 0),
        bounce_buffers=shared.bounce_buffers,
        record_launched=_record_event if is_ahead else None,
    )
    return worker, RegisteredEngine(str(spec.engine_id), generation, needs_ready)


def _record_event() -> Completion:
    """Return an event that completes after all work that this thread has launched on its stream."""
    import torch

    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def _register_with_retries(
    options: Options, spec: Any, derived: DerivedCaches, shared: SharedCaches, deadline: float
) -> client.RankHandle:
    name = f"vllm {spec.engine_id} ({spec.pp_rank}, {spec.tp_rank})"
    connection = connect_to_daemon(options, name, deadline)
    while True:
        try:
            left = max(1.0, deadline - time.monotonic())
            return register_rank(connection, spec, derived.layout, shared, left)
        except EngineError as error:
            if error.code is not Code.BUSY or time.monotonic() + error.retry_after_s > deadline:
                connection.close()
                raise
            time.sleep(error.retry_after_s or 0.1)  # engine start: nothing else waits for this thread
        except BaseException:
            connection.close()
            raise
