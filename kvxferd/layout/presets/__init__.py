"""Layouts built from what engines know: heads, head_dim, dtype, parallel sizes, block size, layout name."""

from kvxferd.layout.presets.attention import LAYOUT_NAMES, attention_layout
from kvxferd.layout.presets.sharding import shard_units, stage_layers

__all__ = ["LAYOUT_NAMES", "attention_layout", "shard_units", "stage_layers"]
