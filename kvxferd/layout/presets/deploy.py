"""Spec and layout of every rank of an engine, from a model and a deployment's options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvxferd.ids import Rank
from kvxferd.layout.engine import EngineSpec
from kvxferd.layout.presets.build import model_layout, model_spec
from kvxferd.layout.presets.deployment_options import DeploymentOptions
from kvxferd.layout.presets.model_facts import ModelFacts
from kvxferd.layout.presets.models import find_model
from kvxferd.layout.tensors import RankLayout

Ranks = dict[Rank, tuple[EngineSpec, RankLayout]]


def deploy(
    model: ModelFacts | str,
    *,
    tp: int = 1,
    pp: int = 1,
    block_tokens: int = 16,
    layout: str = "HND",
    num_blocks: int | Mapping[str, int] = 1024,
    generation: str = "preset",
    engine_id: str = "",
    stages: tuple[int, ...] = (),
    cp: int = 1,
    interleave: int = 1,
    page_bytes: int = 0,
    shared_pages: bool = True,
    draft: ModelFacts | None = None,
) -> Ranks:
    """Return spec and layout of every rank of a model's deployment, stage by stage.

    `DeploymentOptions` has the meaning and unit of each option. `engine_id` is the model's name unless
    given. Raises ValueError for an unknown model, or an option that this model cannot have.
    """
    facts = find_model(model) if isinstance(model, str) else model
    choices = DeploymentOptions(
        tp=tp,
        pp=pp,
        block_tokens=block_tokens,
        layout=layout,
        num_blocks=num_blocks,
        stages=stages,
        cp=cp,
        interleave=interleave,
        page_bytes=page_bytes,
        shared_pages=shared_pages,
        draft=draft,
    )
    return deployed(facts, choices, engine_id=engine_id, generation=generation)


def deployed(
    model: ModelFacts, choices: DeploymentOptions, *, engine_id: str = "", generation: str = "preset"
) -> Ranks:
    """Return the ranks as `deploy` does, for options that are made already."""
    ranks: Ranks = {}
    for pp_rank in range(choices.pp):
        for tp_rank in range(choices.ranks_per_stage):
            rank = Rank(pp_rank, tp_rank)
            spec = model_spec(model, choices, rank, engine_id or model.name, generation)
            ranks[rank] = (spec, model_layout(model, choices, rank))
    return ranks


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
