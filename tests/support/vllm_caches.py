"""Caches as vLLM makes them, of torch tensors, and what its backends write into them.

The tensors have the shapes and strides that vLLM 0.32 makes (`test_real_vllm.py` compares them with
its own functions). A reference writer puts each number where the backend's own indexing puts it; it
shares nothing with the derivation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cache

import torch

from kvxferd.ids import Rank
from kvxferd.integrations.vllm.layout.derivation import DerivedCaches, derive_layout
from kvxferd.integrations.vllm.layout.facts import (
    AttentionFacts,
    CacheGroup,
    CacheKind,
    LayerFacts,
    WorkerFacts,
)
from kvxferd.integrations.vllm.layout.groups import CacheGroups
from kvxferd.layout import EngineSpec
from kvxferd.layout.sharding import stage_layers

FLASH = "FlashAttentionBackend"
CPU = "CPUAttentionBackend"
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
DTYPE = torch.int16  # as wide as bfloat16, and every value is its own


@dataclasses.dataclass(frozen=True)
class Model:
    """A dense attention model."""

    num_layers: int = 3
    num_heads: int = 4
    head_size: int = 16

    def numbers(self, layer: int, heads: range, tokens: range, *, values: bool) -> torch.Tensor:
        """Keys or values, [heads, tokens, head_size]: a number of its own for every element."""
        everything = _numbers_of(self)
        return everything[layer, int(values), heads.start : heads.stop, tokens.start : tokens.stop]


@cache
def _numbers_of(model: Model) -> torch.Tensor:
    """Return a number for every element: [layers, keys and values, heads, tokens, head_size]."""
    shape = (model.num_layers, 2, model.num_heads, 256, model.head_size)
    counted = torch.arange(torch.Size(shape).numel(), dtype=torch.int64).reshape(shape)
    return (counted * 40503 % 65521 - 32768).to(DTYPE)


def layer_views(layout: str, shape: Sequence[int], dtype: torch.dtype = DTYPE) -> list[torch.Tensor]:
    """Return each layer's [blocks, heads, tokens, content] of one allocation in vLLM's order of axes."""
    sizes = dict(zip("LBHNC", shape, strict=True))
    buffer = torch.zeros([sizes[axis] for axis in layout], dtype=dtype)
    return list(buffer.permute([layout.index(axis) for axis in "LBHNC"]))


@dataclasses.dataclass
class TorchRank:
    """One worker: its tensors, and what was derived of them."""

    spec: EngineSpec
    heads: range
    layers: range
    tensors: dict[str, torch.Tensor]
    derived: DerivedCaches


@dataclasses.dataclass(frozen=True)
class Deployment:
    """How an engine is deployed."""

    tp: int = 1
    pp: int = 1
    block_tokens: int = 32  # of an id
    kernel_tokens: int = 0  # of a kernel block; 0: an id is one
    layout: str = "LBHNC"
    backend: str = FLASH
    isa: str = ""
    num_blocks: int = 14

    @property
    def per_id(self) -> int:
        """Kernel blocks of an id."""
        return self.block_tokens // (self.kernel_tokens or self.block_tokens)


class TorchEngine:
    """All workers of an engine."""

    def __init__(self, model: Model, how: Deployment) -> None:
        self.model, self.how = model, how
        self.groups = CacheGroups((CacheGroup(0, CacheKind.FULL, how.block_tokens),), 1)
        self.ranks = {Rank(pp, tp): self._rank(Rank(pp, tp)) for pp in range(how.pp) for tp in range(how.tp)}

    def _rank(self, rank: Rank) -> TorchRank:
        model, how = self.model, self.how
        start, end = stage_layers(model.num_layers, how.pp, rank.pp_rank)
        local = max(1, model.num_heads // how.tp)
        first = rank.tp_rank * model.num_heads // how.tp
        kernel = how.kernel_tokens or how.block_tokens
        shape = (end - start, how.num_blocks * how.per_id, local, kernel, 2 * model.head_size)
        views = layer_views(how.layout, shape)
        names = [f"model.layers.{layer}.self_attn.attn" for layer in range(start, end)]
        facts = AttentionFacts(local, model.head_size, model.head_size, "bfloat16", 2)
        worker = WorkerFacts(
            start, end, model.num_layers, model.num_heads, 0, 0,
            how.tp, rank.tp_rank, how.pp, rank.pp_rank, num_blocks=how.num_blocks,
        )  # fmt: skip
        tensors = dict(zip(names, views, strict=True))
        layers = [LayerFacts(name, 0, facts, how.backend, how.isa) for name in names]
        derived = derive_layout(tensors, layers, self.groups, worker)
        spec = EngineSpec(
            "e", "g", model.num_layers, how.pp, how.tp, rank.pp_rank, rank.tp_rank, model.num_heads
        )
        return TorchRank(spec, range(first, first + local), range(start, end), tensors, derived)

    def write(self, ids: Sequence[int], num_tokens: int) -> None:
        """Put the model's numbers into every rank's blocks, as the backend would."""
        for rank in self.ranks.values():
            for layer, (tensor, at) in self._stretches(rank, ids, num_tokens):
                for values in (False, True):
                    numbers = self.model.numbers(layer, rank.heads, at.tokens, values=values)
                    for view, own in at.places(tensor, self.how, values=values):
                        own_numbers = view(numbers)
                        own.copy_(own_numbers)

    def wrong(self, rank: TorchRank, ids: Sequence[int], first_token: int, num_tokens: int) -> list[str]:
        """Return the places of a rank where the blocks do not hold the model's numbers."""
        found = []
        for layer, (tensor, at) in self._stretches(rank, ids, num_tokens, first_token):
            for values in (False, True):
                numbers = self.model.numbers(layer, rank.heads, at.tokens, values=values)
                for view, own in at.places(tensor, self.how, values=values):
                    if not torch.equal(own, view(numbers)):
                        found.append(f"layer {layer}, {'values' if values else 'keys'} of tokens {at.tokens}")
        return found

    def _stretches(
        self, rank: TorchRank, ids: Sequence[int], num_tokens: int, first_token: int = 0
    ) -> Iterator[tuple[int, tuple[torch.Tensor, Stretch]]]:
        """Yield each layer's tensor with every kernel block that holds tokens."""
        kernel = self.how.kernel_tokens or self.how.block_tokens
        for layer, tensor in zip(rank.layers, rank.tensors.values(), strict=True):
            for position, block in enumerate(ids):
                for inside in range(self.how.per_id):
                    start = first_token + position * self.how.block_tokens + inside * kernel
                    tokens = range(start, min(start + kernel, num_tokens))
                    if tokens:
                        yield layer, (tensor, Stretch(block * self.how.per_id + inside, tokens))


@dataclasses.dataclass(frozen=True)
class Stretch:
    """The tokens of one kernel block."""

    block: int
    tokens: range

    def places(self, tensor: torch.Tensor, how: Deployment, *, values: bool) -> Iterator[tuple]:
        """Yield (what of [heads, tokens, head_size], where it is kept): as each backend indexes its block."""
        count = len(self.tokens)
        size = tensor.shape[-1] // 2
        if how.backend != CPU:
            half = slice(size, None) if values else slice(0, size)
            yield (lambda numbers: numbers), tensor[self.block, :, :count, half]
            return
        heads, block_tokens = tensor.shape[1], tensor.shape[2]
        keys, values_half = tensor.view(tensor.shape[0], heads, 2 * block_tokens, size).chunk(2, dim=2)
        half = (values_half if values else keys)[self.block]
        if how.isa in ("vec", "vec16"):
            if values:
                yield (lambda numbers: numbers), half[:, :count]
            else:
                column_major = half.view(heads, size, block_tokens)
                yield (lambda numbers: numbers.transpose(1, 2)), column_major[:, :, :count]
            return
        assert how.isa == "amx"
        for token in range(count):
            if values:
                tiles = half.view(heads, size // 16, block_tokens // 2, 16, 2)
                yield (
                    lambda numbers, token=token: numbers[:, token].view(-1, size // 16, 16),
                    tiles[:, :, token // 2, :, token % 2],
                )
            else:
                groups = half.view(heads, block_tokens // 16, size // 2, 16, 2)
                yield (
                    lambda numbers, token=token: numbers[:, token].view(-1, size // 2, 2),
                    groups[:, token // 16, :, token % 16],
                )
