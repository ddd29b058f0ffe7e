"""Whether strided sets of bytes share a byte: a cheap test without false negatives.

A set is ``offset + sum(i_k * stride_k) + [0, num_bytes)`` over all indexes of its axes. Sets whose
spans are disjoint cannot overlap. Sets that share their outermost stride are compared modulo it; where
strides differ, the outermost axis is unrolled, index by index, as far as MAX_OVERLAP_WORK allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

Axis = tuple[int, int]  # length, stride in bytes
StridedSet = tuple[int, int, Sequence[Axis]]  # offset, contiguous bytes, axes

# Known layouts need none: they nest. 16,384 parts take 25 to 40 ms, which block the daemon.
MAX_OVERLAP_WORK = 1 << 14


class OverlapBudget:
    """How many parts may still be unrolled or compared: for one layout, or for all layouts of one message."""

    def __init__(self, remaining: int = MAX_OVERLAP_WORK) -> None:
        self.left = remaining

    def spend(self, count: int) -> bool:
        """Take `count` from the budget. Returns False where it has fewer left."""
        self.left -= count
        return self.left >= 0


class _StridedPart(NamedTuple):
    """A set, or a part of one, that is still to be compared."""

    start: int
    num_bytes: int
    axes: tuple[Axis, ...]  # longer than 1, largest stride first
    owner: int  # index of the set it comes from
    # For every axis taken modulo its stride: the range of its indexes, shifted to a common origin.
    index_ranges: tuple[tuple[int, int], ...] = ()

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


def find_overlap(sets: Sequence[StridedSet], budget: OverlapBudget | None = None) -> tuple[int, int] | None:
    """Return the indexes of two sets that share a byte, else None. A set that overlaps itself is both.

    A pair for whose comparison `budget` (by default MAX_OVERLAP_WORK) does not suffice is returned as if it
    overlapped.
    """
    budget = OverlapBudget() if budget is None else budget
    parts = []
    for index, (offset, num_bytes, axes) in enumerate(sets):
        longer = tuple(sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: -axis[1]))
        if any(stride < num_bytes for _, stride in longer):
            return index, index
        parts.append(_StridedPart(offset, num_bytes, longer, index))
    pending = [parts]
    while pending:
        for cluster in _touching_parts(pending.pop()):
            if len(cluster) == 1 and cluster[0].is_nested:
                continue
            stride = max((part.axes[0][1] for part in cluster if part.axes), default=0)
            if stride == 0:
                pair = _overlapping_pair(cluster, budget)
                if pair is not None:
                    return pair
                continue
            if all(part.axes and part.axes[0][1] == stride >= _inner_bytes(part) for part in cluster):
                pending.append(list(_fold_by_stride(cluster, stride)))
                continue
            opened = list(_unroll(cluster, stride, budget.left))
            if not budget.spend(len(opened)):
                return cluster[0].owner, cluster[-1].owner
            pending.append(opened)
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


def _inner_bytes(part: _StridedPart) -> int:
    """Return the bytes spanned at one index of the outermost axis."""
    length, stride = part.axes[0]
    return part.span_bytes - (length - 1) * stride


def _fold_by_stride(cluster: list[_StridedPart], stride: int) -> Iterator[_StridedPart]:
    """Yield the parts modulo their common outermost stride; a part that wraps around appears at both ends."""
    origin = cluster[0].start
    for part in cluster:
        index, start = divmod(part.start - origin, stride)
        length = part.axes[0][0]
        inside = part._replace(axes=part.axes[1:])
        yield inside._replace(start=start, index_ranges=(*part.index_ranges, (index, index + length)))
        if start + inside.span_bytes > stride:
            yield inside._replace(
                start=start - stride, index_ranges=(*part.index_ranges, (index + 1, index + 1 + length))
            )


def _unroll(cluster: list[_StridedPart], stride: int, budget: int) -> Iterator[_StridedPart]:
    """Yield the parts with every axis of the largest stride unrolled; ends soon after `budget` parts."""
    count = 0
    for part in cluster:
        if not part.axes or part.axes[0][1] != stride:
            yield part
            continue
        for step in range(part.axes[0][0]):
            count += 1
            if count > budget + 1:
                return
            yield part._replace(start=part.start + step * stride, axes=part.axes[1:])


def _overlapping_pair(cluster: list[_StridedPart], budget: OverlapBudget) -> tuple[int, int] | None:
    """Return the owners of two contiguous parts that share a byte at indexes that both of them have."""
    for at, first in enumerate(cluster):
        for other in range(at + 1, len(cluster)):
            second = cluster[other]
            if second.start >= first.start + first.num_bytes:
                break
            if not budget.spend(1):
                return first.owner, second.owner
            if len(first.index_ranges) != len(second.index_ranges) or all(
                max(a, c) < min(b, d)
                for (a, b), (c, d) in zip(first.index_ranges, second.index_ranges, strict=True)
            ):
                return first.owner, second.owner
    return None
