"""Describe a worker's cache and register it as a rank with the daemon of its node."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from kvxferd.client.gpu_events import Completion
from kvxferd.engine.registration import OF_CHILD, register_regions
from kvxferd.integrations.vllm.identity import agreed_generation, engine_spec, model_fingerprint
from kvxferd.integrations.vllm.layout import specs
from kvxferd.integrations.vllm.layout.derivation import DerivedCaches, derive_layout
from kvxferd.integrations.vllm.layout.groups import CacheGroups
from kvxferd.integrations.vllm.layout.opaque import opaque_report
from kvxferd.integrations.vllm.memory.placement_advice import PlacementFailure, failure_of
from kvxferd.integrations.vllm.options import Options
from kvxferd.integrations.vllm.session.worker import ConnectorWorker
from kvxferd.memory import MemoryPlacement

_LOG = logging.getLogger("vllm.kvxferd")

_PLACEMENTS = {"auto": None, "child": OF_CHILD, "resident": (MemoryPlacement.RESIDENT,)}


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


def register_caches(
    vllm_config: Any, derived: DerivedCaches, options: Options, pool_failure: PlacementFailure | None = None
) -> ConnectorWorker:
    """Register this worker's caches with the first placement that works. Blocks, at engine start.

    `pool_failure`: why the cache is not in the connector's pool. Every worker of the engine must call this,
    because they agree on the generation together. Raises KvxferdError.
    """
    import torch

    is_on_device = any(storage.device != "cpu" for storage in derived.storages)
    # vLLM returns a step's tokens while the draft of that step still writes its own layers.
    is_ahead = specs.draft_model(vllm_config) is not None and is_on_device
    # Of a request that is read while it is computed, each rank reports its own part.
    is_progressive = options.progressive and vllm_config.kv_transfer_config.is_kv_producer
    reports_ready = is_ahead or is_progressive
    tp_rank, pp_rank, _ = specs.read_position(vllm_config)
    spec = engine_spec(
        vllm_config,
        tp_rank=tp_rank,
        pp_rank=pp_rank,
        generation=agreed_generation(vllm_config),
        home=options.home,
        fingerprint=options.model_fingerprint or model_fingerprint(vllm_config),
        publish_implies_ready=not reports_ready,
    )
    began = time.monotonic()
    rank = register_regions(
        options.socket,
        spec,
        derived.layout,
        derived.storages,
        placements=_PLACEMENTS[options.placement],
        timeout_s=options.connect_timeout_s,
        explain=lambda error: str(failure_of(error, pool_failure, torch.version.cuda or "")),
        insist='set "placement": "resident"',
        log=_LOG,
    )
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
    return ConnectorWorker(
        rank,
        options.pull_deadline_s,
        reports_ready=reports_ready,
        recomputes_failed=vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute",
        record_launched=_record_event if is_ahead or (is_progressive and is_on_device) else None,
    )


def _record_event() -> Completion:
    """Return an event that completes after all work that this thread has launched on its stream."""
    import torch

    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
