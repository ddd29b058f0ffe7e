"""Spec and layout of every rank of an engine, from a model and a deployment's options."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvxferd.ids import Rank
from kvxferd.layout.engine import EngineSpec
from kvxferd.layout.presets.build import model_layout, model_spec
from kvxferd.layout.presets.deployment_options import DeploymentOptions
from kvxferd.layout.presets.model_facts import LayerKind, ModelFacts, key_and_value
from kvxferd.layout.presets.models import find_model
from kvxferd.layout.tensors import RankLayout

Ranks = dict[Rank, tuple[EngineSpec, RankLayout]]


def deploy(
    model: ModelFacts | str,
    options: DeploymentOptions | None = None,
    *,
    engine_id: str = "",
    generation: str = "preset",
    **fields: Any,
) -> Ranks:
    """Return spec and layout of every rank of a model's deployment, stage by stage.

    `fields` are those of `DeploymentOptions`, unless `options` has them all already; the layout is the
    model's default unless given. `engine_id` is the model's name unless given. Raises ValueError for an
    unknown model, or an option that this model cannot have.
    """
    facts = find_model(model) if isinstance(model, str) else model
    chosen = DeploymentOptions(**{"layout": facts.default_layout, **fields}) if options is None else options
    ranks: Ranks = {}
    for pp_rank in range(chosen.pp):
        for tp_rank in range(chosen.ranks_per_stage):
            rank = Rank(pp_rank, tp_rank)
            spec = model_spec(facts, chosen, rank, engine_id or facts.name, generation)
            ranks[rank] = (spec, model_layout(facts, chosen, rank))
    return ranks


def attention_layout(
    *,
    spec: EngineSpec,
    num_kv_heads: int,
    head_dim: int,
    block_tokens: int,
    num_blocks: int,
    layout: str = "HND",
) -> RankLayout:
    """Return the layout of one rank of a plain attention model: bfloat16 components "k" and "v" per layer.

    The rank is `spec.rank`. All tensors lie in one region, "kv", and their blocks are one group, "full".
    Raises ValueError for an unknown `layout`, as `DeploymentOptions` does.
    """
    heads = key_and_value(num_kv_heads, head_dim)
    model = ModelFacts("plain", num_kv_heads, (LayerKind.FULL,) * spec.num_layers, heads)
    options = DeploymentOptions(spec.tp_size, spec.pp_size, block_tokens, layout, num_blocks)
    return model_layout(model, options, spec.rank)


def with_kv_dtype(model: ModelFacts, dtype: str, itemsize: int) -> ModelFacts:
    """Return the model with keys, values and latents in another dtype; scales and states keep theirs.

    `itemsize` is the bytes of one element.
    """
    arrays = tuple(
        tuple(
            dataclasses.replace(
                c, dtype=dtype, itemsize=itemsize, head_bytes=c.head_bytes // c.itemsize * itemsize
            )
            if c.name in ("k", "v", "latent")
            else c
            for c in array
        )
        for array in model.token_arrays
    )
    return dataclasses.replace(model, token_arrays=arrays)
