"""What the connector knows of vLLM's caches: the tables that its code looks things up in.

docs/reference/vllm-support.md is made from these tables. A class of caches that is in none of them is
refused, because nothing tells how its blocks are used. A backend, mixer or quantisation that is in none of
them is no reason to stop an engine: its pages move as they are, between engines that are alike (`opaque`).
Names are vLLM's, of its versions 0.32 and 0.33.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from kvxferd.integrations.vllm.layout.facts import CacheKind

SUPPORT_PAGE = "docs/reference/vllm-support.md"


class CacheSupport(NamedTuple):
    """A class of vLLM's cache specs. `kind` is None where it is refused."""

    kind: CacheKind | None
    note: str
    is_latent: bool = False


class BlockContent(Enum):
    """What a kernel block of an attention backend holds."""

    KEY_THEN_VALUE = "each token's key and then its value, for each head"
    LATENT_ROW = "a row for each token or group of tokens, the same on every rank"
    DEEPSEEK_RECORD = "DeepSeek V4's records: rows, or all values and then all scales; the same on every rank"
    INDEXER = "all keys of the indexer, then all scales; the same on every rank"
    CPU_PACKED = "all keys of a head, then all values, packed for the instruction set"


class Support(NamedTuple):
    """Whether something is accepted, and what is to be said of it."""

    is_supported: bool
    note: str


# Versions of vLLM, and what of each was run here. With another one the connector starts and warns.
VLLM_VERSIONS: Mapping[str, str] = {
    "0.32": "real engines on CPUs: tests of `make test-vllm`",
    "0.33": "its own specs and views, imported on CPUs; its other calls around sleep, over stand-ins",
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
    "CircularBufferSpec": CacheSupport(
        CacheKind.STATE, "the ring of the group of tokens that is still open, at the same token; whole"
    ),
    "ChunkedLocalAttentionSpec": CacheSupport(None, "attention within chunks frees blocks by another rule"),
    "CrossAttentionSpec": CacheSupport(None, "an encoder's states are no tokens of the prompt"),
    "EncoderOnlyAttentionSpec": CacheSupport(None, "it keeps no cache"),
    "HiSparseHotSpec": CacheSupport(None, "it lives for one step's requests"),
    "HiSparseResidentSpec": CacheSupport(None, "its pages are copies of host memory"),
    "HiddenStateCacheSpec": CacheSupport(None, "hidden states that others read, no cache of attention"),
    "RSWASpec": CacheSupport(None, "blocks between the prompt and the window are freed by another rule"),
    "SinkFullAttentionSpec": CacheSupport(None, "sink tokens stand before the prompt's"),
}
# One block of a request, in which a later token takes an earlier one's place.
RING_SPEC = "CircularBufferSpec"
# A group whose layers have one spec each. Its layers must use blocks alike.
UNIFORM_SPEC = "UniformTypeKVCacheSpecs"

# Class names too: backends of one name() arrange blocks in different ways.
BACKENDS: Mapping[str, BlockContent] = {
    **dict.fromkeys(
        (  # `split(head_size, -1)` of a head's content in each one's forward
            "FlashAttentionBackend",
            "FlashAttentionDiffKVBackend",
            "FlashInferBackend",
            "FlexAttentionBackend",
            "HpcAttentionBackend",
            "MiniMaxM3SparseBackend",
            "MiniMaxM3SparseCutlassBackend",
            "MiniMaxM3SparseMSABackend",
            "MiniMaxM3SparseTritonBackend",
            "Qwen4ExpQSAFlashAttentionBackend",
            "Step5DSAAttentionBackend",
            "Step5SplitKVFlashAttentionBackend",
            "TritonAttentionBackend",
            "TritonAttentionDiffKVBackend",
        ),
        BlockContent.KEY_THEN_VALUE,
    ),
    **dict.fromkeys(
        (
            "AMXMLABackend",
            "CPUMLABackend",
            "CompressorBackend",
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
            "KpoolTailBackend",
            "MiniMaxM3IndexerBackend",
            "MiniMaxM3IndexerMSABackend",
            "QSAStateBackend",
            "Step5CSATailRingBackend",
            "Step5SparseSummaryBackend",
            "TokenspeedMLABackend",
            "TritonMLABackend",
        ),
        BlockContent.LATENT_ROW,
    ),
    **dict.fromkeys(
        (
            "DeepseekSparseSWABackend",
            "DeepseekSparseSWAFlashInferBackend",
            "DeepseekSparseSWAFlashMLABackend",
            "DeepseekV4FlashInferMLASparseBackend",
            "DeepseekV4FlashMLABackend",
            "FlashMLAMegaAttnBackend",
        ),
        BlockContent.DEEPSEEK_RECORD,
    ),
    **dict.fromkeys(
        (
            "DeepseekV32IndexerBackend",
            "DeepseekV41IndexerBackend",
            "DeepseekV41SparseIndexerBackend",
            "DeepseekV4IndexerBackend",
            "Glm5NextIndexerBackend",
        ),
        BlockContent.INDEXER,
    ),
    "CPUAttentionBackend": BlockContent.CPU_PACKED,
}
# What a row or record is, where it is not the layer's latent.
ROW_COMPONENTS: Mapping[str, str] = {
    "CompressorBackend": "compressor",
    "DeepseekSparseSWABackend": "window",
    "DeepseekSparseSWAFlashInferBackend": "window",
    "DeepseekSparseSWAFlashMLABackend": "window",
    "MiniMaxM3IndexerBackend": "indexer.k",
    "MiniMaxM3IndexerMSABackend": "indexer.k",
    "QSAStateBackend": "indexer.k",
    "Step5SparseSummaryBackend": "summary",
}
# Of the backends of keys and values, the one that may have a scale behind each head's key and value.
TOKEN_SCALES_BACKEND = "TritonAttentionBackend"
REFUSED_BACKENDS: Mapping[str, str] = {"NoAttentionBackend": "it keeps no cache"}

# One row for each state, with contents and scales; its size is that of the spec.
ROW_DTYPES = ("fp8_ds_mla", "nvfp4_ds_mla")

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
    "prefill_context_parallel_size": Support(
        False, "its ranks would all register as one (pp_rank, tp_rank); use 1"
    ),
}

# Methods of speculative decoding that keep nothing in the cache. Of all others the draft's cache moves too.
METHODS_WITHOUT_DRAFT_CACHE = ("custom_class", "medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix")


class FieldRule(NamedTuple):
    """What the connector requires of a field of one of vLLM's objects."""

    field: str
    accepted: str
    accepts: Callable[[Any], bool]
    refusal: str  # a format of `found`, the object


# Of an attention spec.
SPEC_RULES = (
    FieldRule(
        "tokens_per_state",
        "a whole number",
        lambda spec: isinstance(spec.tokens_per_state, int) and spec.tokens_per_state > 0,
        "tokens_per_state is {found.tokens_per_state}: several states for one token are not known here",
    ),
)
# Of vLLM's CacheConfig, for a layer whose cache is quantised.
QUANTISED_CACHE_RULES = (
    FieldRule(
        "calculate_kv_scales",
        "off, where the cache is quantised",
        lambda config: not getattr(config, "calculate_kv_scales", False),
        "calculate_kv_scales is on: its scales are calculated at run time and differ from engine to engine",
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


def version_of_opaque_caches(declared: str, vllm_version: str) -> str:
    """Return the version by which opaque pages are compared; "" for a source tree of vLLM, which has none."""
    return declared or ("" if vllm_version == "dev" else vllm_version)


def refusal_of_backend(name: str) -> str | None:
    """Return why a layer with this backend is refused; None for any other, known here or not."""
    if not name:
        return "its attention backend has no name, by which engines could be compared"
    why = REFUSED_BACKENDS.get(name)
    return None if why is None else f"its attention backend is {name}: {why}"
