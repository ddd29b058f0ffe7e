"""Plain attention caches, K and V apart, in the arrangements that engines use."""

from __future__ import annotations

from kvxferd.ids import GroupName, RegionId
from kvxferd.layout.engine import EngineSpec
from kvxferd.layout.presets.deployment_options import DeploymentOptions
from kvxferd.layout.presets.model_facts import key_and_value
from kvxferd.layout.presets.token_arrays import TokenArray
from kvxferd.layout.sharding import stage_layers
from kvxferd.layout.tensors import Group, RankLayout, RegionSpec


def attention_layout(
    *,
    spec: EngineSpec,
    num_kv_heads: int,
    head_dim: int,
    block_tokens: int,
    num_blocks: int,
    itemsize: int = 2,
    dtype: str = "bfloat16",
    layout: str = "HND",
    start_layer: int | None = None,
    end_layer: int | None = None,
    group: str = "full",
    region: str = "kv",
    page_bytes: int = 0,
) -> RankLayout:
    """Return the layout of one rank of a plain attention model: components "k" and "v" per layer.

    The rank is `spec.rank`. Heads are divided as by `shard_units`, layers as by `stage_layers` unless
    `start_layer` and `end_layer` are given. All tensors lie in one region, which has no unused bytes
    beside padding. Raises ValueError for an unknown `layout`, as `DeploymentOptions` does.
    """
    first, last = stage_layers(spec.num_layers, spec.pp_size, spec.pp_rank)
    first = first if start_layer is None else start_layer
    last = last if end_layer is None else end_layer
    options = DeploymentOptions(
        tp=spec.tp_size,
        block_tokens=block_tokens,
        layout=layout,
        num_blocks=num_blocks,
        page_bytes=page_bytes,
    )
    held = Group(GroupName(group), num_blocks, block_tokens)
    (components,) = key_and_value(num_kv_heads, head_dim, dtype, itemsize)
    array = TokenArray(components, options, options.share(spec.rank), held, last - first)
    tensors = tuple(array.tensors(range(first, last), 0, RegionId(region)))
    return RankLayout(first, last, (held,), tensors, (RegionSpec(RegionId(region), array.total_bytes),))
