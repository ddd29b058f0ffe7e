"""The options of a deployment, equal on every rank of it; the model decides the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from kvxferd.ids import Rank
from kvxferd.layout.sharding import stage_layers
from kvxferd.layout.tensors import TokenShard

# An arrangement is the order of the axes, outermost first. `l`: layer, `c`: K or V, `b`: block,
# `n`: head, `t`: token. The content of a head (head_dim x itemsize) is always innermost.
AXIS_ORDERS: dict[str, str] = {
    "HND": "lcbnt",  # K/V split first: [layer][2, blocks, heads, tokens, head_dim]
    "NHD": "lcbtn",  # [layer][2, blocks, tokens, heads, head_dim]
    "HND-blocks-first": "lbcnt",  # [layer][blocks, 2, heads, tokens, head_dim]
    "NHD-blocks-first": "lbctn",
    "HND-cross-layer": "blcnt",  # one page holds every layer of a block
    "NHD-cross-layer": "blctn",
    "HND-packed": "lbntc",  # K and V of one head and token side by side
    "NHD-packed": "lbtnc",
    # vLLM's names: L layer, B block, H head, N token, C content, which is K and V side by side.
    "LBHNC": "lbntc",
    "LBNHC": "lbtnc",
    "BLHNC": "blntc",
    "BLNHC": "bltnc",
    "BHLNC": "bnltc",
    "LHBNC": "lnbtc",
}

LAYOUT_NAMES: tuple[str, ...] = tuple(AXIS_ORDERS)

# K as [heads, head_dim / x, tokens, x] with x elements of 16 bytes together, V as [heads, head_dim, tokens].
VECTORISED = "vectorised"
CHUNK_BYTES = 16

ARRANGEMENTS: tuple[str, ...] = (*LAYOUT_NAMES, VECTORISED)


class ShardPosition(NamedTuple):
    """A rank's share of the heads and of the tokens."""

    tp_size: int
    tp_rank: int
    tokens: TokenShard


@dataclasses.dataclass(frozen=True)
class DeploymentOptions:
    """A deployment's options. Raises ValueError for sizes that no engine can have."""

    tp: int = 1
    pp: int = 1
    block_tokens: int = 16  # tokens of a kernel block, on one rank
    layout: str = "HND"  # a name of ARRANGEMENTS; the suffix "+SD" keeps convolution states row by row
    num_blocks: int | Mapping[str, int] = 1024  # ids of every group, or by the group's name
    stages: tuple[int, ...] = ()  # layers of each pipeline stage, where they are not balanced
    cp: int = 1  # ranks that share the tokens of one tensor-parallel share
    interleave: int = 1  # tokens in a row on one of them
    page_bytes: int = 0  # the least number of bytes from one block to the next: pages are padded to it
    shared_pages: bool = True  # a hybrid's attention and states overlay one another, as in vLLM

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "block_tokens", "cp", "interleave"):
            _require(getattr(self, name) >= 1, f"{name} {getattr(self, name)}: it must be 1 or more")
        counts = self.num_blocks.values() if isinstance(self.num_blocks, Mapping) else [self.num_blocks]
        _require(all(n >= 1 for n in counts), f"num_blocks {self.num_blocks}: it must be 1 or more")
        _require(self.page_bytes >= 0, f"page_bytes {self.page_bytes}: it must not be negative")
        _require(
            not self.stages or len(self.stages) == self.pp,
            f"{len(self.stages)} stages: pp is {self.pp}",
        )
        _require(
            self.cp == 1 or self.block_tokens % self.interleave == 0,
            f"interleave {self.interleave}: it does not divide the block of {self.block_tokens} tokens",
        )
        name, _, conv = self.layout.partition("+")
        _require(name in ARRANGEMENTS, f"layout {self.layout!r}: the names are {', '.join(ARRANGEMENTS)}")
        _require(conv in ("", "DS", "SD"), f"layout {self.layout!r}: behind the + goes DS or SD")

    @property
    def arrangement(self) -> str:
        """Return the order of the axes: a name of LAYOUT_NAMES, or VECTORISED."""
        return self.layout.partition("+")[0]

    @property
    def has_cross_layer_pages(self) -> bool:
        """Whether one page holds every layer of a block."""
        return AXIS_ORDERS.get(self.arrangement, "").startswith("b")

    @property
    def is_row_major(self) -> bool:
        """Whether convolution states lie row by row over all channels (SD)."""
        return self.layout.endswith("+SD")

    @property
    def ranks_per_stage(self) -> int:
        """Return the ranks of a stage: `tp` times `cp`, flattened with the token shards innermost."""
        return self.tp * self.cp

    def share(self, rank: Rank) -> ShardPosition:
        """Return a rank's share of the heads and of the tokens."""
        tp_rank, cp_rank = divmod(rank.tp_rank, self.cp)
        tokens = TokenShard(self.cp, cp_rank, self.interleave) if self.cp > 1 else TokenShard()
        return ShardPosition(self.tp, tp_rank, tokens)

    def blocks_of(self, group: str) -> int:
        """Return how many ids a group has; raises ValueError for a group that `num_blocks` does not name."""
        if not isinstance(self.num_blocks, Mapping):
            return self.num_blocks
        _require(group in self.num_blocks, f"num_blocks {dict(self.num_blocks)}: it lacks group {group!r}")
        return self.num_blocks[group]

    def stage(self, num_layers: int, pp_rank: int) -> range:
        """Return the layers of a pipeline stage, of a model of `num_layers`."""
        if not self.stages:
            return range(*stage_layers(num_layers, self.pp, pp_rank))
        _require(
            sum(self.stages) == num_layers and min(self.stages) >= 0,
            f"stages of {', '.join(map(str, self.stages))} layers: the model has {num_layers}",
        )
        start = sum(self.stages[:pp_rank])
        return range(start, start + self.stages[pp_rank])


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(f"cannot deploy with {otherwise}")
