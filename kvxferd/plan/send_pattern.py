"""What a producer rank sends: strided copies, and from which bases. `kvxferd.plan.sender` has the plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from kvxferd.ids import Rank
from kvxferd.layout import GroupKind
from kvxferd.plan.assignment import shared_fraction
from kvxferd.plan.plan import BlockGeometry, Strides


class Axis(NamedTuple):
    """Positions at equal distances, each a stride further than the one before; strides in bytes."""

    num_positions: int
    source_stride: int
    destination_stride: int


class StridedCopy(NamedTuple):
    """`length` contiguous bytes at every position along the axes; once if there is no axis."""

    axes: tuple[Axis, ...]
    length: int

    @property
    def num_runs(self) -> int:
        """Return at how many positions bytes lie."""
        return math.prod(axis.num_positions for axis in self.axes)

    @property
    def num_bytes(self) -> int:
        """Return the bytes at all positions."""
        return self.num_runs * self.length


class SendBase(NamedTuple):
    """Where a pattern begins: consecutive units of one component of one layer. Offsets are bytes.

    In its region a block's copy begins at tensor + offset + block * block stride, on either side.
    """

    layer: int
    component: str
    first_unit: int  # global
    source_tensor: int  # the cache tensor's offset in the producer's region
    destination_tensor: int
    source_offset: int  # from the component's first unit, in the producer's block
    destination_offset: int

    @property
    def at_destination(self) -> int:
        """Return where the copy into block 0 begins in the consumer's region."""
        return self.destination_tensor + self.destination_offset


class SendPart(NamedTuple):
    """The triple of in-engine senders: source offset, destination offset, length, for whole blocks."""

    consumer: Rank
    layer: int
    component: str
    source_offset: int  # bytes from the component's first unit, in the producer's block
    destination_offset: int  # bytes from the component's first unit, in the consumer's block
    length: int  # bytes, contiguous on both sides


@dataclasses.dataclass(frozen=True, slots=True)
class SendPattern:
    """One stride pattern: the same copy from every base to one consumer rank.

    `content` is what is copied of one item (the tokens of a granule; a whole state), its axes outermost
    first. `copy_of` adds the axis of the items that lie in one kernel block on both sides.
    """

    consumer: Rank
    source: BlockGeometry
    destination: BlockGeometry
    granule_tokens: int
    source_strides: Strides
    destination_strides: Strides
    bases: tuple[SendBase, ...]
    content: StridedCopy

    def copy_of(self, num_items: int) -> StridedCopy:
        """Return the copy of consecutive items, in the fewest runs: what touches on both sides is joined."""
        items = Axis(num_items, self.source_strides.token, self.destination_strides.token)
        return _fold((*self.content.axes, items), self.content.length)

    @property
    def num_items(self) -> int:
        """Return the items of the longest copy that repeats through any two lists that begin together.

        Block sizes of 12 and 16 tokens repeat every 4 tokens. Lists that begin apart may need shorter
        copies; `runs` takes the longest that the lists allow.
        """
        if self.source.kind is GroupKind.STATE:
            return 1
        sizes = [self.source.block_tokens, self.destination.block_tokens]
        if self.source.shard != self.destination.shard:
            shards = (self.source.shard, self.destination.shard)
            sizes += [shard.interleave for shard in shards if shard.count > 1]
        return math.gcd(*sizes) // self.granule_tokens

    @property
    def copy(self) -> StridedCopy:
        """Return the copy of `num_items` items."""
        return self.copy_of(self.num_items)

    @property
    def is_whole_block(self) -> bool:
        """Whether the copy is that of one whole kernel block on each side."""
        tokens = self.num_items * self.granule_tokens
        return self.source.kind is GroupKind.STATE or (
            tokens == self.source.block_tokens == self.destination.block_tokens
        )

    def parts(self) -> list[SendPart]:
        """Return a triple for each base.

        Raises ValueError where a triple cannot express the copy: blocks differ in size, or what is
        sent of a block is not contiguous on both sides.
        """
        copy = self.copy
        if copy.axes:
            raise self._no_triple(f"it takes {copy.num_runs} runs")
        if not self.is_whole_block:
            sizes = f"{self.source.block_tokens} and {self.destination.block_tokens}"
            raise self._no_triple(f"blocks of {sizes} tokens have {copy.length} bytes in common")
        return [
            SendPart(self.consumer, b.layer, b.component, b.source_offset, b.destination_offset, copy.length)
            for b in self.bases
        ]

    def _no_triple(self, why: str) -> ValueError:
        return ValueError(
            f"cannot give a block of group {self.source.group!r} to {self.consumer} as one offset and one "
            f"length: {why}"
        )

    def num_bytes(self, num_tokens: int) -> Fraction:
        """Return the bytes of a request of `num_tokens` tokens; of a state, whatever the tokens.

        Blocks that are partly filled count in part: it is a fraction where an item has several tokens,
        or where ranks share the tokens.
        """
        of_an_item = self.content.num_bytes * len(self.bases)
        if self.source.kind is GroupKind.STATE:
            return Fraction(of_an_item)
        both = shared_fraction(self.destination.shard, self.source.shard)
        return of_an_item * num_tokens * both / self.granule_tokens


def _fold(axes: Iterable[Axis], length: int) -> StridedCopy:
    """Return the copy without the axes along which it is contiguous on both sides."""
    left = [axis for axis in axes if axis.num_positions > 1]
    while True:
        within = next((a for a in left if a.source_stride == length == a.destination_stride), None)
        if within is None:
            return StridedCopy(tuple(left), length)
        left.remove(within)
        length *= within.num_positions
