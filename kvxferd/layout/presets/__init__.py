"""Layouts built from what engines know: heads, head_dim, dtype, parallel sizes, block size, layout name."""

from kvxferd.layout.presets.attention import LAYOUT_NAMES, attention_layout
from kvxferd.layout.presets.build import blocks_per_logical, model_layout, model_ranks, model_spec
from kvxferd.layout.presets.facts import LayerKind, ModelFacts, StateComponent, TokenComponent
from kvxferd.layout.presets.models import MODELS
from kvxferd.layout.presets.sharding import shard_units, stage_layers

__all__ = [
    "LAYOUT_NAMES",
    "MODELS",
    "LayerKind",
    "ModelFacts",
    "StateComponent",
    "TokenComponent",
    "attention_layout",
    "blocks_per_logical",
    "model_layout",
    "model_ranks",
    "model_spec",
    "shard_units",
    "stage_layers",
]
