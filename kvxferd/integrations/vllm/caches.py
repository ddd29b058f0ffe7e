"""This worker's cache as vLLM has made it: what the connector asks for when its caches are registered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvxferd.integrations.vllm import vllm_specs
from kvxferd.integrations.vllm.groups import CacheGroups
from kvxferd.integrations.vllm.layout_derivation import CacheStorage, DerivedCaches, derive_layout

__all__ = ["CacheStorage", "DerivedCaches", "derive_layout"]


def derive_caches(kv_caches: Mapping[str, Any], kv_cache_config: Any, vllm_config: Any) -> DerivedCaches:
    """Return the layout of this rank and the memory behind it, in a worker of vLLM.

    Raises LayoutError, naming the layer or group and why, for what is not understood.
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
