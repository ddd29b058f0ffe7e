"""A vLLM engine's generation and spec, and a fingerprint of its model that two engines can compare."""

from __future__ import annotations

import hashlib
from typing import Any

from kvxferd.errors import Code, EngineError
from kvxferd.ids import Endpoint, EngineId, Generation
from kvxferd.integrations.common.agreement import gather_from_ranks
from kvxferd.integrations.common.model_digest import Model, fingerprint_of_model
from kvxferd.integrations.vllm.layout import specs
from kvxferd.layout import EngineSpec


def start_generation(vllm_config: Any) -> Generation:
    """Return the generation that this start of an engine has, on the node of its first rank.

    vLLM names each start by its time in nanoseconds, and passes that name to every process of its scheduler's
    node. Raises EngineError for a vLLM without it.
    """
    name = str(getattr(vllm_config, "instance_id", ""))
    if not name:
        raise EngineError("cannot use this vLLM: it does not name its starts (instance_id)", Code.BAD_VERSION)
    return Generation(hashlib.blake2s(name.encode(), digest_size=8).hexdigest())


def agreed_generation(vllm_config: Any) -> Generation:
    """Return the first rank's. Every worker of the engine calls this once; it blocks until all have."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return gather_from_ranks((get_tp_group(), get_pp_group()), start_generation(vllm_config))[0]


def engine_spec(
    vllm_config: Any,
    *,
    tp_rank: int,
    pp_rank: int,
    generation: str,
    home: str,
    fingerprint: str,
    publish_implies_ready: bool,
) -> EngineSpec:
    """Return the spec of the rank `(pp_rank, tp_rank)`.

    A data-parallel replica is an engine of its own: vLLM appends its rank to the engine's id.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    draft = specs.draft_model(vllm_config)
    draft_layers = 0 if draft is None else draft.get_total_num_hidden_layers()
    return EngineSpec(
        engine_id=EngineId(vllm_config.kv_transfer_config.engine_id),
        generation=Generation(generation),
        num_layers=model.get_total_num_hidden_layers() + draft_layers,
        pp_size=parallel.pipeline_parallel_size,
        tp_size=parallel.tensor_parallel_size,
        pp_rank=pp_rank,
        tp_rank=tp_rank,
        num_kv_heads=specs.total_kv_heads(model),
        fingerprint=fingerprint,
        home=Endpoint(home),
        publish_implies_ready=publish_implies_ready,
    )


def model_fingerprint(vllm_config: Any) -> str:
    """Return a text that is equal for two engines whose caches hold the same values.

    It has architecture, dtype, quantisation and a digest of configuration and weights, and the same of a
    draft model. It does not depend on the engine's parallel sizes or layout, nor on the name or path by
    which it found the model.
    """
    parts = [_model_part(vllm_config.model_config)]
    draft = specs.draft_model(vllm_config)
    if draft is not None:
        parts.append(f"{vllm_config.speculative_config.method}:{_model_part(draft)}")
    return "+".join(parts)


def _model_part(model: Any) -> str:
    """Return one model's part of the fingerprint."""
    digested = Model(
        str(model.model),
        model.revision,
        lambda: dict(model.hf_config.to_dict()),
        overrides=getattr(model, "hf_overrides", None),
        loads_files=str(getattr(model, "load_format", "auto")) != "dummy",
        weights=getattr(model, "model_weights", ""),
    )
    architectures = getattr(model, "architectures", None)
    return fingerprint_of_model(digested, architectures, model.dtype, model.quantization)
