"""Whether strided sets of bytes share a byte: a cheap test without false negatives.

A set is ``offset + sum(i_k * stride_k) + [0, num_bytes)`` over all indexes of its axes. Sets whose spans are
disjoint cannot overlap. Sets that lie among one another are compared modulo their outermost stride, which
they share in every cache: what one engine allocates in a block repeats from block to block. Where they do
not, or an axis steps into what lies inside it, the sets count as overlapping.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

Axis = tuple[int, int]  # length, stride in bytes
StridedSet = tuple[int, int, Sequence[Axis]]  # offset, contiguous bytes, axes


class _StridedPart(NamedTuple):
    """A set, or a part of one, that is still to be compared."""

    start: int
    num_bytes: int
    axes: tuple[Axis, ...]  # longer than 1, largest stride first
    owner: int  # index of the set it comes from

    @property
    def span_bytes(self) -> int:
        """Return the bytes from the part's first byte to past its last."""
        return self.num_bytes + sum((length - 1) * stride for length, stride in self.axes)

    @property
    def is_nested(self) -> bool:
        """Whether every axis steps over all that lies inside it, so that no two of its bytes can coincide."""
        inside = self.num_bytes
        for length, stride in reversed(self.axes):
            if stride < inside:
                return False
            inside += (length - 1) * stride
        return True


def find_overlap(sets: Sequence[StridedSet]) -> tuple[int, int] | None:
    """Return the indexes of two sets that share a byte, else None. A set that overlaps itself is both.

    Sets that lie among one another in steps of unlike sizes are returned as if they overlapped.
    """
    parts = []
    for index, (offset, num_bytes, axes) in enumerate(sets):
        longer = sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: -axis[1])
        parts.append(_StridedPart(offset, num_bytes, tuple(longer), index))
        if not parts[-1].is_nested:
            return index, index
    pending = [parts]
    while pending:
        for cluster in _touching_parts(pending.pop()):
            first, *others = (part.owner for part in cluster)
            other = next((owner for owner in others if owner != first), None)
            if other is None:  # a set that is nested shares no byte with itself
                continue
            strides = {part.axes[0][1] if part.axes else 0 for part in cluster}
            if len(strides) > 1 or strides == {0}:
                return first, other
            pending.append(list(_fold_by_stride(cluster, *strides)))
    return None


def _touching_parts(parts: list[_StridedPart]) -> Iterator[list[_StridedPart]]:
    """Yield groups of parts whose spans overlap one another."""
    cluster: list[_StridedPart] = []
    end = 0
    for part in sorted(parts):
        if cluster and part.start >= end:
            yield cluster
            cluster = []
        end = max(end, part.start + part.span_bytes) if cluster else part.start + part.span_bytes
        cluster.append(part)
    if cluster:
        yield cluster


def _fold_by_stride(cluster: list[_StridedPart], stride: int) -> Iterator[_StridedPart]:
    """Yield the parts modulo their common outermost stride; a part that wraps around appears at both ends."""
    origin = cluster[0].start
    for part in cluster:
        inside = part._replace(start=(part.start - origin) % stride, axes=part.axes[1:])
        yield inside
        if inside.start + inside.span_bytes > stride:
            yield inside._replace(start=inside.start - stride)
