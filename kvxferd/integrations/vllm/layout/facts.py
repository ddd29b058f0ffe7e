"""The facts of vLLM that the derivation of a layout needs, as plain values; vLLM's rules of names and shares.

`specs` reads them from vLLM's objects. The other modules compute with them alone, and so run
where vLLM is not installed.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from math import prod
from typing import NamedTuple

from kvxferd.errors import LayoutError
from kvxferd.layout import UnitRange

# A draft that is a model of its own numbers its layers from 0, and so do some models' own drafts (the
# MTP of Qwen3-Next, Qwen3.5, EXAONE, Nemotron-H). All others continue after the model's last layer.
_DRAFTS_FROM_ZERO = ("draft_model.", "mtp.")


class CacheKind(StrEnum):
    """How the blocks of a vLLM cache group are used. The values are parts of group names."""

    FULL = "full"  # a block for every block_tokens tokens
    SLIDING = "sliding"  # blocks before the window are freed
    STATE = "state"  # a request's running state


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """One of vLLM's cache groups, the same in the scheduler and in the workers.

    `kept_tokens` are the newest tokens of a sliding window that the next token still needs: the
    window less the next token itself, and the tokens that speculation retains behind it.
    """

    index: int  # among all groups of the KVCacheConfig, and of its list among the block lists
    kind: CacheKind
    block_tokens: int  # of one id on one rank
    kept_tokens: int | None = None
    shard_count: int = 1  # ranks over which decode context parallelism divides the tokens
    speculative_blocks: int = 0  # scratch slots behind a running state
    state_by_position: bool = False  # a state's list has an entry for every block of tokens
    is_never_cached: bool = False  # of no request does a local prefix cache have blocks of this group


@dataclasses.dataclass(frozen=True)
class AttentionFacts:
    """One attention layer's cache: keys and values, or a latent.

    A kernel block is [slots, states, content]: a state stands for `tokens_per_state` tokens.
    """

    num_heads: int  # on this rank
    head_size: int
    head_size_v: int  # 0: a latent, without values
    dtype: str  # "bfloat16", "float8_e4m3fn", ...
    itemsize: int
    encoding: str = ""  # vLLM's name of the packing of a state's content, where the dtype does not tell it
    tokens_per_state: int = 1
    num_head_slots: int | None = None  # None: a slot for each head
    packed_bytes: int | None = None  # of a slot of one state; None: the elements of key and value

    @property
    def num_slots(self) -> int:
        """Return how many slots a state has."""
        return self.num_heads if self.num_head_slots is None else self.num_head_slots

    @property
    def element_bytes(self) -> int:
        """Return the bytes of one head's key and value, without anything beside them."""
        return (self.head_size + self.head_size_v) * self.itemsize

    @property
    def content_bytes(self) -> int:
        """Return the bytes of a slot of one state."""
        return self.element_bytes if self.packed_bytes is None else self.packed_bytes


@dataclasses.dataclass(frozen=True)
class StateFacts:
    """One layer's recurrent state: the shapes and dtypes of its parts on this rank, in page order."""

    mixer: str  # vLLM's name of the kind: "mamba1", "mamba2", "gdn_attn", ...
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[tuple[str, int], ...]  # name and itemsize
    is_conv_dim_first: bool = False  # DS; else SD
    is_replicated: bool = False  # every tensor-parallel rank holds all of it
    num_groups: int | None = None  # of B and C in the whole model, where the model has them

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Return the bytes of each part on this rank."""
        return tuple(
            prod(shape) * itemsize for shape, (_, itemsize) in zip(self.shapes, self.dtypes, strict=True)
        )


@dataclasses.dataclass(frozen=True)
class LayerFacts:
    """One layer that has a cache."""

    name: str  # "model.layers.3.self_attn.attn"
    group: int  # index of its CacheGroup
    cache: AttentionFacts | StateFacts
    backend: str = ""  # class name of its attention backend
    isa: str = ""  # the instruction set that vLLM's CPU attention packs blocks for
    implementation: str = ""  # module and class of its backend, and the distributions outside vLLM it is of
    has_mx_scales: bool = False  # an indexer's scales are four powers of two, not one float32
    cache_dtype: str = ""  # vLLM's name of it: "auto", "fp8", "nvfp4", or a plugin's own
    is_plugin_dtype: bool = False  # registered by a plugin, which alone knows what a block holds


@dataclasses.dataclass(frozen=True)
class WorkerFacts:
    """This worker's position in its engine."""

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
    vllm_version: str = ""  # or what an operator declares in its place
    device: str = ""  # what `read_device` returns; opaque pages need it

    @property
    def num_layers(self) -> int:
        """Return the layers of the whole engine; a draft model's are numbered after the model's own."""
        return self.num_model_layers + self.num_draft_layers

    @property
    def stage(self) -> range:
        """Return the layers of this rank; the draft model runs on the last stage."""
        is_last = self.pp_rank == self.pp_size - 1
        return range(self.start_layer, self.end_layer + (self.num_draft_layers if is_last else 0))

    @property
    def dcp_rank(self) -> int:
        """Return this rank's token shard under decode context parallelism."""
        return self.tp_rank % self.dcp_size


def layer_error(layer: str, why: str) -> LayoutError:
    """Return the error for a layer whose cache cannot be described."""
    return LayoutError(f"cannot describe the cache of layer {layer!r}: {why}")


class LayerKey(NamedTuple):
    """A cache's layer, and a suffix that distinguishes caches of the same kind in one layer."""

    layer: int
    suffix: str

    def component(self, name: str) -> str:
        """Return the component's name with this key's suffix."""
        return name + self.suffix


def layer_key_of(name: str, worker: WorkerFacts) -> LayerKey:
    """Return the layer and suffix of a cache. Raises LayoutError for a name without a layer's number.

    The first number in a name is the layer, counted over all pipeline stages; layers of a draft
    follow the model's. A second number (two attentions in one layer) becomes a suffix.
    """
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if not numbers:
        raise layer_error(name, "its name has no layer number")
    layer = numbers[0]
    if name.startswith(_DRAFTS_FROM_ZERO):
        layer += worker.num_model_layers
    if layer not in worker.stage:
        raise layer_error(
            name,
            f"layer {layer} is none of this rank's, [{worker.stage.start}, {worker.stage.stop}) "
            f"of {worker.num_layers} ({worker.num_draft_layers} of them a draft's)",
        )
    return LayerKey(layer, "".join(f".{number}" for number in numbers[1:]))


def is_draft(layer: int, worker: WorkerFacts) -> bool:
    """Whether a layer belongs to the draft model."""
    return layer >= worker.num_model_layers


def unit_range_of_rank(local: int, total: int, tp_size: int, tp_rank: int) -> UnitRange:
    """Return the units that a rank with `local` of `total` units holds.

    vLLM divides evenly, and gives neighbours a copy of one unit each where there are more ranks
    than units. Raises ValueError where `local` fits neither rule.
    """
    if local == total:
        return UnitRange(0, total)
    if total >= tp_size and local * tp_size == total:
        return UnitRange(tp_rank * local, (tp_rank + 1) * local)
    if total < tp_size and local == 1 and tp_size % total == 0:
        unit = tp_rank * total // tp_size
        return UnitRange(unit, unit + 1)
    raise ValueError(f"{local} of {total} are held by rank {tp_rank} of {tp_size}")
