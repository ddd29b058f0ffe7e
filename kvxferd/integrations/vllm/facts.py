"""What the derivation of a layout needs to know of vLLM, as plain values.

`reading` takes them from vLLM's objects; everything else here computes with them alone, and so runs
where vLLM is not installed.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum


class CacheKind(StrEnum):
    """How the blocks of a vLLM cache group are used. The values are parts of group names."""

    FULL = "full"  # a block for every stretch of tokens
    SLIDING = "sliding"  # blocks before the window are given back
    STATE = "state"  # a request's running state


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """One of vLLM's cache groups, as scheduler and workers both see it.

    `kept_tokens` are the newest tokens of a sliding window that the next token still needs: the
    window without the token that looks through it, and what speculation retains behind it.
    """

    index: int  # among all groups of the KVCacheConfig: where its list is among the block lists
    kind: CacheKind
    block_tokens: int  # of one id on one rank
    kept_tokens: int | None = None
    shard_count: int = 1  # ranks over which decode context parallelism deals out the tokens
    speculative_blocks: int = 0  # scratch slots behind a running state
    state_by_position: bool = False  # a state's list has a place for every block of tokens


@dataclasses.dataclass(frozen=True)
class AttentionFacts:
    """One attention layer's cache, keys and values or a latent."""

    num_heads: int  # on this rank
    head_size: int
    head_size_v: int  # 0: a latent, without values
    dtype: str  # what the bytes are: "bfloat16", "float8_e4m3fn", ...
    itemsize: int
    is_indexer: bool = False  # the key cache of a sparse attention's indexer
    encoding: str = ""  # where a token's content is a packing of its own


@dataclasses.dataclass(frozen=True)
class StateFacts:
    """One layer's recurrent state: the shapes and dtypes of its parts on this rank, in page order."""

    mixer: str  # vLLM's name of the kind: "mamba1", "mamba2", "gdn_attn", ...
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[tuple[str, int], ...]  # name and itemsize
    is_conv_dim_first: bool = False  # DS; else SD
    is_replicated: bool = False  # every tensor-parallel rank holds all of it
    num_groups: int | None = None  # of B and C in the whole model, where the model has them


@dataclasses.dataclass(frozen=True)
class LayerFacts:
    """One layer that has a cache."""

    name: str  # "model.layers.3.self_attn.attn"
    group: int  # index of its CacheGroup
    cache: AttentionFacts | StateFacts
    backend: str = ""  # class name of its attention backend
    isa: str = ""  # the instruction set for which vLLM's CPU attention packs the block


@dataclasses.dataclass(frozen=True)
class WorkerFacts:
    """This worker's place in its engine."""

    start_layer: int  # the pipeline stage's layers of the model, without its draft
    end_layer: int
    num_model_layers: int
    num_kv_heads: int  # of the whole model; 0: latents only
    num_draft_layers: int = 0
    num_draft_kv_heads: int = 0
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    dcp_size: int = 1
    interleave: int = 1  # tokens in a row on one of the ranks that decode context parallelism uses
    num_blocks: int = 0  # ids of every group

    @property
    def num_layers(self) -> int:
        """Layers of the whole engine; a draft model's are counted behind the model's own."""
        return self.num_model_layers + self.num_draft_layers

    @property
    def stage(self) -> range:
        """Layers of this rank; the draft model runs on the last stage."""
        is_last = self.pp_rank == self.pp_size - 1
        return range(self.start_layer, self.end_layer + (self.num_draft_layers if is_last else 0))

    @property
    def dcp_rank(self) -> int:
        """Which turn of the tokens this rank has where context parallelism shards them."""
        return self.tp_rank % self.dcp_size
