"""Describe a worker's cache and register it as a rank with the daemon of its node."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvxferd.client.gpu_events import Completion
from kvxferd.engine.placement_search import PlacementSearch
from kvxferd.integrations.vllm.generation import agree_on_generation, start_tag
from kvxferd.integrations.vllm.identity import engine_spec
from kvxferd.integrations.vllm.layout import specs
from kvxferd.integrations.vllm.layout.derivation import DerivedCaches, derive_layout
from kvxferd.integrations.vllm.layout.groups import CacheGroups
from kvxferd.integrations.vllm.layout.opaque import opaque_report
from kvxferd.integrations.vllm.memory.gpu_placement import PlacementFailure, gpu_placement_search
from kvxferd.integrations.vllm.memory.memory_sharing import SharedCaches, register_rank, share_rank
from kvxferd.integrations.vllm.options import Options, home_of
from kvxferd.integrations.vllm.session.step_metadata import EngineReport
from kvxferd.integrations.vllm.session.worker import ConnectorWorker

_LOG = logging.getLogger("vllm.kvxferd")


def derive_caches(
    kv_caches: Mapping[str, Any], kv_cache_config: Any, vllm_config: Any, vllm_version: str
) -> DerivedCaches:
    """Return the layout of this worker's rank, with its allocations. `kv_caches` is by layer name.

    Raises LayoutError, naming the layer or group that it cannot describe, and why.
    """
    tp_rank, pp_rank, stage = specs.read_position(vllm_config)
    layers = specs.read_layers(
        kv_cache_config,
        vllm_config,
        is_conv_dim_first=specs.conv_state_is_dim_first(),
        fp8_dtype=specs.platform_fp8_dtype(),
        has_mx_scales=specs.indexers_have_mx_scales(),
        plugin_dtypes=specs.plugin_cache_dtypes(),
    )
    worker = specs.read_worker(
        vllm_config,
        kv_cache_config,
        tp_rank=tp_rank,
        pp_rank=pp_rank,
        stage=stage,
        vllm_version=vllm_version,
        device=specs.read_device(_device_index(kv_caches)),
    )
    derived = derive_layout(kv_caches, layers, CacheGroups.from_vllm(vllm_config, kv_cache_config), worker)
    specs.fill_token_scales(layers, kv_caches, vllm_config)
    if derived.opaque_layers:
        _LOG.info("%s", opaque_report(derived.opaque_layers, vllm_version, worker.device))
    return derived


def _device_index(kv_caches: Mapping[str, Any]) -> int:
    """Return torch's index of the device of a worker's caches; a CPU has none, and 0 does."""
    for found in kv_caches.values():
        tensor = found[0] if isinstance(found, (list, tuple)) else found
        return tensor.device.index or 0
    return 0


class RegisteredCaches(NamedTuple):
    """What `register_caches` made."""

    worker: ConnectorWorker  # the rank's side of the connector
    engine: EngineReport  # as the scheduler needs it
    shared: SharedCaches


def register_caches(
    vllm_config: Any, derived: DerivedCaches, options: Options, pool_failure: PlacementFailure | None = None
) -> RegisteredCaches:
    """Register this worker's caches. Blocks, at engine start. Raises KvxferdError.

    A cache in GPU memory is registered with the first placement that works; without one the error names
    each and why. `pool_failure`: why the cache is not in the connector's pool. Every worker of the engine
    must call this, because they agree on the generation together.
    """
    is_on_device = any(s.device != "cpu" for s in derived.storages)
    search = _placement_search(vllm_config, options, pool_failure) if is_on_device else None
    sharing = share_rank(derived, options, search)
    # vLLM returns a step's tokens while the draft of that step still writes its own layers.
    is_ahead = specs.draft_model(vllm_config) is not None and is_on_device
    # Of a request that is read while it is computed, each rank reports its own part.
    is_progressive = options.progressive and vllm_config.kv_transfer_config.is_kv_producer
    generation, needs_ready = agree_on_generation(
        start_tag(vllm_config), sharing.shared.bounce_buffers is not None or is_ahead or is_progressive
    )
    spec = engine_spec(
        vllm_config,
        generation=generation,
        home=home_of(options),
        fingerprint=options.model_fingerprint,
        publish_implies_ready=not needs_ready,
    )
    began = time.monotonic()
    rank = register_rank(sharing, derived, options, spec, began + options.connect_timeout_s)
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
        recomputes_failed=vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute",
        bounce_buffers=sharing.shared.bounce_buffers,
        record_launched=_record_event if is_ahead or (is_progressive and is_on_device) else None,
    )
    registered = EngineReport(str(spec.engine_id), generation, needs_ready)
    return RegisteredCaches(worker, registered, sharing.shared)


def _record_event() -> Completion:
    """Return an event that completes after all work that this thread has launched on its stream."""
    import torch

    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def _placement_search(
    vllm_config: Any, options: Options, pool_failure: PlacementFailure | None
) -> PlacementSearch:
    import torch

    tp_rank, pp_rank, _ = specs.read_position(vllm_config)
    rank = f"rank ({pp_rank}, {tp_rank}) of {vllm_config.kv_transfer_config.engine_id}"
    return gpu_placement_search(rank, options.gpu_placement, pool_failure, torch.version.cuda or "")
