"""What the connector accepts of vLLM, and what it refuses: the tables that its code looks things up in.

docs/reference/vllm-support.md is made from these tables. A name that is in none of them is refused too:
an unknown cache is never guessed. Names are vLLM's, of its versions 0.32 and 0.33.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from kvxferd.integrations.vllm.layout.facts import CacheKind


class CacheSupport(NamedTuple):
    """A class of vLLM's cache specs. `kind` is None where it is refused."""

    kind: CacheKind | None
    note: str
    is_latent: bool = False


class BlockContent(Enum):
    """What a kernel block of an attention backend holds."""

    KEY_THEN_VALUE = "each token's key and then its value, for each head"
    LATENT_ROW = "a row for each token, the same on every rank"
    INDEXER = "all keys of the indexer, then all scales"
    CPU_PACKED = "all keys of a head, then all values, packed for the instruction set"


class BackendSupport(NamedTuple):
    """A class of vLLM's attention backends. `content` is None where it is refused; `note` tells why."""

    content: BlockContent | None
    note: str = ""


class Support(NamedTuple):
    """Whether something is accepted, and what is to be said of it."""

    is_supported: bool
    note: str


# Versions of vLLM, and what of each was run here. With another one the connector starts and warns.
VLLM_VERSIONS: Mapping[str, str] = {
    "0.32": "real engines on CPUs: every test of `make test-vllm`",
    "0.33": "read in its sources; its other calls around sleep, over stand-ins",
}

# Exact class names (vllm/v1/kv_cache_interface.py): a subclass may mean something else.
CACHES: Mapping[str, CacheSupport] = {
    "FullAttentionSpec": CacheSupport(CacheKind.FULL, "keys and values; all blocks of a request"),
    "MLAAttentionSpec": CacheSupport(CacheKind.FULL, "a latent; all blocks of a request", is_latent=True),
    "SlidingWindowSpec": CacheSupport(CacheKind.SLIDING, "keys and values; the blocks of the window"),
    "SlidingWindowMLASpec": CacheSupport(
        CacheKind.SLIDING, "a latent; the blocks of the window", is_latent=True
    ),
    "MambaSpec": CacheSupport(CacheKind.STATE, "the state at the prompt's last token but one"),
    "ChunkedLocalAttentionSpec": CacheSupport(None, "attention within chunks frees blocks by another rule"),
    "CircularBufferSpec": CacheSupport(None, "a ring of tokens that are still being compressed"),
    "CrossAttentionSpec": CacheSupport(None, "an encoder's states are no tokens of the prompt"),
    "EncoderOnlyAttentionSpec": CacheSupport(None, "it keeps no cache"),
    "HiSparseHotSpec": CacheSupport(None, "it lives for one step's requests"),
    "HiSparseResidentSpec": CacheSupport(None, "its pages are copies of host memory"),
    "HiddenStateCacheSpec": CacheSupport(None, "hidden states that others read, no cache of attention"),
    "RSWASpec": CacheSupport(None, "blocks between the prompt and the window are freed by another rule"),
    "SinkFullAttentionSpec": CacheSupport(None, "sink tokens stand before the prompt's"),
}
# A group whose layers have one spec each. Its layers must use blocks alike.
UNIFORM_SPEC = "UniformTypeKVCacheSpecs"

_PACKED = "tokens are packed in a way that is not described here"
_NOT_DESCRIBED = "its block is not described here"
_ROCM = "ROCm is not supported"
# Class names too: backends of one name() arrange blocks in different ways.
BACKENDS: Mapping[str, BackendSupport] = {
    **dict.fromkeys(
        (  # `split(head_size, -1)` of a head's content in each one's forward
            "FlashAttentionBackend",
            "FlashAttentionDiffKVBackend",
            "FlashInferBackend",
            "FlexAttentionBackend",
            "HpcAttentionBackend",
            "TritonAttentionBackend",
            "TritonAttentionDiffKVBackend",
        ),
        BackendSupport(BlockContent.KEY_THEN_VALUE),
    ),
    **dict.fromkeys(
        (
            "AMXMLABackend",
            "CPUMLABackend",
            "CutlassMLABackend",
            "FlashAttnMLABackend",
            "FlashAttnMLASparseBackend",
            "FlashAttnMLASparseFA4Backend",
            "FlashInferMLABackend",
            "FlashInferMLASparseSM120Backend",
            "FlashInferMLASparseSM90Backend",
            "FlashInferMLASparseTRTLLMBackend",
            "FlashMLABackend",
            "FlashMLASparseBackend",
            "TokenspeedMLABackend",
            "TritonMLABackend",
        ),
        BackendSupport(BlockContent.LATENT_ROW),
    ),
    "DeepseekV32IndexerBackend": BackendSupport(BlockContent.INDEXER),
    "CPUAttentionBackend": BackendSupport(BlockContent.CPU_PACKED),
    **dict.fromkeys(
        (
            "AiterFlashAttentionBackend",
            "AiterMLABackend",
            "AiterTritonMLABackend",
            "DeepseekV41ROCMAiterMLASparseBackend",
            "DeepseekV41RocmMxfp4IndexerBackend",
            "DeepseekV4ROCMAiterMLASparseBackend",
            "ROCMAiterMLASparseBackend",
            "RocmAiterUnifiedAttentionBackend",
            "RocmAttentionBackend",
            "RocmOctaveAttentionBackend",
            "RocmSegmentedAttentionBackend",
        ),
        BackendSupport(None, _ROCM),
    ),
    "NoAttentionBackend": BackendSupport(None, "it keeps no cache"),
    **dict.fromkeys(
        ("TurboQuantAttentionBackend", "UltraQuantAttentionBackend"), BackendSupport(None, _PACKED)
    ),
    **dict.fromkeys(
        (
            "B12xPagedAttentionBackend",
            "DeepseekSparseSWABackend",
            "DeepseekV41IndexerBackend",
            "DeepseekV41SparseIndexerBackend",
            "DeepseekV4FlashInferMLASparseBackend",
            "DeepseekV4FlashMLABackend",
            "DeepseekV4IndexerBackend",
            "FlashMLAMegaAttnBackend",
            "Glm5NextIndexerBackend",
            "KpoolTailBackend",
            "MiniMaxM3SparseBackend",
            "MiniMaxM3SparseCutlassBackend",
            "MiniMaxM3SparseTritonBackend",
            "Step5DSAAttentionBackend",
            "TritonFlashAttentionBackend",
            "TritonFlashInferBackend",
            "XPUFlashAttnMLABackend",
            "XPUMLASparseBackend",
        ),
        BackendSupport(None, _NOT_DESCRIBED),
    ),
}

# vLLM's `KVQuantMode` of a cache. An opaque row (below) is accepted in any mode.
QUANT_MODES: Mapping[str, Support] = {
    "NONE": Support(True, "`bfloat16`, `float16`, `float32`, as the model has it"),
    "FP8_PER_TENSOR": Support(True, "`fp8`, `fp8_e4m3`, `fp8_e5m2`, with scales from the checkpoint"),
    **dict.fromkeys(
        ("INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD", "INT4_PER_TOKEN_HEAD"),
        Support(False, "each token has scales of its own"),
    ),
    "NVFP4": Support(False, "blocks of values have scales of their own"),
    **dict.fromkeys(
        (
            "TURBOQUANT_K8V4",
            "TURBOQUANT_4BIT_NC",
            "TURBOQUANT_K3V4_NC",
            "TURBOQUANT_3BIT_NC",
            "ULTRAQUANT_4BIT",
            "OCTAVE_K3V3",
            "OCTAVE_K3V3_COMPACT",
            "OCTAVE_K3V4",
        ),
        Support(False, _PACKED),
    ),
    "NVFP4_DS_MLA": Support(False, "except the opaque rows of a latent, `nvfp4_ds_mla`"),
}
# One opaque row for each token, with contents and scales; its size is that of the spec.
OPAQUE_DTYPES = ("fp8_ds_mla", "nvfp4_ds_mla")

# Mixers of recurrent layers, and how many states each has.
MIXERS: Mapping[str, tuple[int, str]] = {
    "mamba1": (2, "convolution and state, divided by channels"),
    "mamba2": (2, "convolution as x, B and C; state by heads"),
    "gdn_attn": (2, "convolution as Q, K and V; state by heads"),
    "short_conv": (1, "convolution alone"),
    "linear": (1, "state alone, by heads"),
}

# Sizes of vLLM's ParallelConfig.
PARALLEL_SIZES: Mapping[str, Support] = {
    "tensor_parallel_size": Support(True, "any size reads from any other, copies of heads included"),
    "pipeline_parallel_size": Support(True, "any size reads from any other, on either side"),
    "data_parallel_size": Support(True, "each replica is an engine of its own"),
    "decode_context_parallel_size": Support(True, "any size and interleaving to any other"),
    "prefill_context_parallel_size": Support(False, "use 1"),
}

# Methods of speculative decoding that keep nothing in the cache. Of all others the draft's cache moves too.
METHODS_WITHOUT_DRAFT_CACHE = ("custom_class", "medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix")


class FieldRule(NamedTuple):
    """What the connector requires of a field of one of vLLM's objects."""

    field: str
    accepted: str
    accepts: Callable[[Any, bool], bool]  # of the object, and the flag of the rule's table
    refusal: str  # a format of `found`, the object


# Of an accepted attention spec. The flag: its rows are opaque.
SPEC_RULES = (
    FieldRule(
        "tokens_per_state",
        "1",
        lambda spec, _: spec.tokens_per_state == 1,
        "a cache with a state for {found.tokens_per_state} tokens is not known here",
    ),
    FieldRule(
        "num_head_slots",
        "none, or as many as heads",
        lambda spec, _: spec.num_head_slots in (None, spec.num_kv_heads),
        "{found.num_head_slots} slots for {found.num_kv_heads} heads are not known here",
    ),
    FieldRule(
        "state_content_bytes",
        "none, except for opaque rows",
        lambda spec, is_opaque: is_opaque or spec.state_content_bytes is None,
        "a content of {found.state_content_bytes} bytes is not known here",
    ),
)
# Of the spec of a sliding window. The flag means nothing.
WINDOW_RULES = (
    FieldRule(
        "bounded_replay",
        "off",
        lambda spec, _: not getattr(spec, "bounded_replay", False),
        "a sliding window with bounded replay is not known here",
    ),
)
# Of vLLM's CacheConfig. The flag: the layer's cache is FP8_PER_TENSOR.
CACHE_CONFIG_RULES = (
    FieldRule(
        "calculate_kv_scales",
        "off, where the cache is fp8",
        lambda config, is_fp8: not (is_fp8 and getattr(config, "calculate_kv_scales", False)),
        "its fp8 scales are calculated at run time and differ from engine to engine",
    ),
)


def version_warning(version: str) -> str | None:
    """Return a sentence for a version of vLLM that this connector was not written for, else None."""
    found = re.match(r"(\d+\.\d+)(\.|$)", version)
    if found is not None and found[1] in VLLM_VERSIONS:
        return None
    return (
        f"the connector was written for vLLM {' and '.join(VLLM_VERSIONS)}, and this is {version}: "
        "compare tokens with those of one engine before you trust it"
    )
