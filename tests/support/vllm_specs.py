"""Stand-ins for vLLM's objects, with the names and attributes of vLLM 0.33's."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import torch


class QuantMode(enum.IntEnum):
    """vLLM's modes of a cache's quantisation."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2


class Mixer(enum.Enum):
    """vLLM's kinds of recurrent layers."""

    MAMBA1 = "path.of.Mamba1AttentionBackend"
    MAMBA2 = "path.of.Mamba2AttentionBackend"
    GDN_ATTN = "path.of.GDNAttentionBackend"
    SHORT_CONV = "path.of.ShortConvAttentionBackend"


class Spec:
    """The fields of vLLM's specs, as attention mostly has them."""

    def __init__(self, **more: Any) -> None:
        vars(self).update(
            block_size=16,
            dcp_sharded=True,
            num_kv_heads=2,
            head_size=64,
            head_size_v=64,
            dtype=torch.bfloat16,
            kv_quant_mode=QuantMode.NONE,
            tokens_per_state=1,
            num_head_slots=None,
            state_content_bytes=None,
        )
        vars(self).update(more)


def spec(kind: str, **more: Any) -> Any:
    """Return a spec of a class of this name."""
    return type(kind, (Spec,), {})(**more)


def mamba_spec(
    mixer: Mixer, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...], **more: Any
) -> Any:
    """Return the spec of a recurrent layer."""
    usual = {
        "block_size": 512,
        "dcp_sharded": False,
        "mamba_cache_mode": "none",
        "num_speculative_blocks": 0,
        "tp_replicated": False,
    }
    return spec("MambaSpec", mamba_type=mixer, shapes=shapes, dtypes=dtypes, **usual | more)


class Backend:
    """An attention backend."""


class Layer:
    """A module of vLLM's forward context."""

    def __init__(self, kv_cache_dtype: str = "auto", *, backend: type = Backend, **more: Any) -> None:
        self.kv_cache_dtype, self._backend = kv_cache_dtype, backend
        vars(self).update(more)

    def get_attn_backend(self) -> type:
        """Return its backend."""
        return self._backend


def vllm_config(
    layers: dict[str, Any] | None = None,
    *,
    num_layers: int = 32,
    num_kv_heads: int = 8,
    num_groups: int = 8,
    use_mla: bool = False,
    **parallel: Any,
) -> Any:
    """Return a VllmConfig of a model with these modules, without speculation."""
    sizes = {
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 2,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "cp_kv_cache_interleave_size": 1,
    }
    model = SimpleNamespace(
        use_mla=use_mla,
        is_attention_free=False,
        hf_text_config=SimpleNamespace(mamba_n_groups=num_groups),
        get_total_num_hidden_layers=lambda: num_layers,
        get_total_num_kv_heads=lambda: num_kv_heads,
    )
    return SimpleNamespace(
        model_config=model,
        speculative_config=None,
        kv_transfer_config=SimpleNamespace(engine_id="engine"),
        num_prefill_lookahead_tokens=0,
        cache_config=SimpleNamespace(cache_dtype="auto", calculate_kv_scales=False),
        parallel_config=SimpleNamespace(**(sizes | parallel)),
        compilation_config=SimpleNamespace(static_forward_context=layers or {}),
    )
