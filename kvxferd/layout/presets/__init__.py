"""Layouts built from a model (heads, head_dim, dtype) and a deployment (parallel sizes, blocks, layout name).

`deploy` returns spec and layout of every rank of a model known by name, `attention_layout` the layout of
one rank of a plain attention model. All sizes and strides are bytes.
"""

from kvxferd.layout.presets.deploy import attention_layout, deploy, with_kv_dtype
from kvxferd.layout.presets.deployment_options import LAYOUT_NAMES, DeploymentOptions
from kvxferd.layout.presets.model_facts import (
    LayerKind,
    ModelFacts,
    SideCache,
    StateComponent,
    TokenComponent,
    key_and_value,
)
from kvxferd.layout.presets.models import MODELS, find_model

__all__ = [
    "LAYOUT_NAMES",
    "MODELS",
    "DeploymentOptions",
    "LayerKind",
    "ModelFacts",
    "SideCache",
    "StateComponent",
    "TokenComponent",
    "attention_layout",
    "deploy",
    "find_model",
    "key_and_value",
    "with_kv_dtype",
]
