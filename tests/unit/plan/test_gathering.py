"""Patterns of an ask, and the blocks that it may name, against brute force byte by byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.ids import GroupName, RegionId
from kvxferd.layout import CacheTensor, Group, PackedBlocks, RankLayout, RegionSpec, UnitRange, pack_ids
from kvxferd.layout.areas import BlockArea, block_areas
from kvxferd.layout.validate import axes_of
from kvxferd.plan.covering import Stretches
from kvxferd.plan.gathering import (
    MAX_PATTERNS_PER_FORM,
    GrantedBlocks,
    Pattern,
    gather_stretches,
    patterns_of,
)
from kvxferd.plan.stretches import cover_block

KV = RegionId("kv")
FULL = GroupName("full")


@st.composite
def runs_of_a_block(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Runs that overlap on neither side: local offsets, remote offsets and lengths, of a few patterns."""
    remote, length = [], []
    at = 0
    for _ in range(draw(st.integers(1, 4))):
        outer, inner, size = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.sampled_from([4, 8]))
        gap, row_gap = draw(st.integers(0, 9)), draw(st.integers(0, 20))
        for _ in range(outer):
            for _ in range(inner):
                remote.append(at)
                length.append(size)
                at += size + gap
            at += row_gap
    order = draw(st.permutations(range(len(remote))))
    local = [0] * len(remote)
    at = 0
    for index in order:
        local[index] = at
        at += length[index]
    return local, remote, length


@given(runs=runs_of_a_block(), origins=st.lists(st.integers(0, 50), min_size=1, max_size=4, unique=True))
def test_packed_images_give_each_byte_to_the_same_place(
    runs: tuple[list[int], list[int], list[int]], origins: list[int]
) -> None:
    columns = tuple(np.array(column, dtype=np.int64) for column in runs)
    classes = cover_block([columns], 1 << 20)  # type: ignore[list-item]
    assert classes is not None
    stride = 4096
    bases = np.sort(np.array(origins)) * stride
    expected: dict[int, int] = {}
    found: dict[int, int] = {}
    for block in bases.tolist():
        for local, remote, length in zip(*runs, strict=True):
            expected.update({block + local + i: block + remote + i for i in range(length)})
    for form, remote, local in classes:
        stretches = Stretches(
            form, KV, (remote[:, None] + bases).ravel(), (local[:, None, :] + bases[:, None]).reshape(-1, 1)
        )
        gathered = gather_stretches(stretches)
        if gathered is None:
            count = sum(len(patterns_of(c.image, c.length) or range(99)) for c in form.copies)
            assert count > MAX_PATTERNS_PER_FORM
            return
        for one in gathered:
            pattern, packed = one
            covered = one.covering()
            low, high = pattern.extent
            assert np.array_equal(covered.remote, packed.remote + low)
            assert covered.form.size_bytes == high - low
            assert all((np.diff(copies.image) > 0).all() for copies in covered.form.copies)
            assert all(np.array_equal(*pair) for pair in zip(covered.runs(7), one.runs(7), strict=True))
            assert packed.form.is_packed
            assert packed.form.size_bytes == pattern.size_bytes
            (copies,) = packed.form.copies
            for start, origin in zip(packed.remote.tolist(), packed.local[:, 0].tolist(), strict=True):
                image = [start + int(o) + i for o in pattern.offsets() for i in range(pattern.length)]
                for at, to in zip(copies.image.tolist(), copies.local.tolist(), strict=True):
                    for i in range(copies.length):
                        assert origin + to + i not in found
                        found[origin + to + i] = image[at + i]
    assert found == expected


@given(st.lists(st.integers(0, 200), min_size=1, max_size=40, unique=True))
def test_patterns_yield_the_offsets_in_their_order(offsets: list[int]) -> None:
    found = patterns_of(np.array(offsets, dtype=np.int64), 4)
    if found is not None:
        yielded = [first + int(o) for first, pattern in found for o in pattern.offsets()]
        assert yielded == offsets


def test_a_quarter_of_the_heads_of_each_token_is_one_pattern() -> None:
    assert patterns_of(np.arange(16) * 2048, 512) == [(0, Pattern(512, 1, 0, 16, 2048))]


def test_heads_of_tokens_are_one_pattern_of_two_strides() -> None:
    offsets = (np.arange(16)[:, None] * 2048 + np.arange(3) * 300).ravel()
    assert patterns_of(offsets, 256) == [(0, Pattern(256, 16, 2048, 3, 300))]


def test_what_does_not_repeat_has_no_pattern() -> None:
    offsets = np.cumsum(np.arange(1, 100) ** 2)
    assert patterns_of(offsets, 1) is None


@given(st.integers(1, 5), st.integers(-9, 9), st.integers(1, 5), st.integers(-9, 9), st.integers(1, 6))
def test_an_extent_is_that_of_the_runs(
    outer: int, outer_stride: int, inner: int, inner_stride: int, length: int
) -> None:
    pattern = Pattern(length, outer, outer_stride, inner, inner_stride)
    offsets = pattern.offsets()
    assert pattern.extent == (offsets.min(), offsets.max() + length)


# --- granted blocks


def holds(granted: GrantedBlocks, starts: list[int], extent: tuple[int, int], region: RegionId = KV) -> bool:
    begins = np.array(starts, dtype=np.int64) + extent[0]
    return granted.holds(region, begins, np.full(len(begins), extent[1] - extent[0]))


@st.composite
def layouts(draw: st.DrawFn) -> RankLayout:
    """Up to two groups of a few tensors, with blocks inside, outside or between the other axes."""
    groups, tensors = [], []
    for number in range(draw(st.integers(1, 2))):
        name = GroupName(f"g{number}")
        per_id = draw(st.sampled_from([1, 2]))
        groups.append(
            Group(name=name, num_blocks=4, block_tokens=2 * per_id, physical_blocks_per_logical=per_id)
        )
        for layer in range(draw(st.integers(1, 3))):
            tensors.append(
                CacheTensor(
                    layer=layer,
                    component="k",
                    group=name,
                    region=KV,
                    offset=draw(st.integers(0, 60)),
                    block_stride=draw(st.sampled_from([4, 16, 24, 32])),
                    token_stride=draw(st.sampled_from([4, 8, 12, 128])),
                    unit_stride=draw(st.sampled_from([4, 8])),
                    units=(UnitRange(0, draw(st.integers(1, 2))),),
                    chunk_bytes=4,
                    granule_tokens=1,
                )
            )
    return RankLayout(
        start_layer=0,
        end_layer=3,
        groups=tuple(groups),
        tensors=tuple(tensors),
        regions=(RegionSpec(KV, 4096),),
    )


def hull(layout: RankLayout, tensor: CacheTensor, block: int) -> range:
    """The bytes from the first to the last of one physical block of a tensor."""
    group = next(g for g in layout.groups if g.name == tensor.group)
    reach = sum((count - 1) * stride for count, stride in axes_of(tensor, group)[1:])
    start = tensor.offset + block * tensor.block_stride
    return range(start, start + reach + tensor.chunk_bytes)


@given(layout=layouts(), ids=st.sets(st.integers(0, 3)), start=st.integers(-8, 400), size=st.integers(1, 40))
def test_what_is_held_lies_in_granted_blocks(
    layout: RankLayout, ids: set[int], start: int, size: int
) -> None:
    """Every byte that an ask may name lies between bytes of a granted block of some tensor."""
    blocks = {group.name: PackedBlocks(pack_ids(sorted(ids))) for group in layout.groups}
    granted = GrantedBlocks(block_areas(layout), blocks)
    if not holds(granted, [start], (0, size)):
        return
    allowed: set[int] = set()
    for tensor in layout.tensors:
        per_id = next(g for g in layout.groups if g.name == tensor.group).physical_blocks_per_logical
        for block in ids:
            for part in range(block * per_id, (block + 1) * per_id):
                allowed.update(hull(layout, tensor, part))
    assert allowed.issuperset(range(start, start + size))


@given(
    st.sets(st.integers(0, 9), min_size=1),
    st.lists(st.tuples(st.integers(-2, 12), st.integers(-5, 25)), min_size=1, max_size=6),
    st.integers(1, 20),
)
def test_starts_are_checked_one_by_one(ids: set[int], starts: list[tuple[int, int]], size: int) -> None:
    """Two layers of 20 bytes a block, the second 1,000 bytes behind the first."""
    areas = [BlockArea(KV, FULL, offset, 20, 30, 1) for offset in (100, 1100)]
    granted = GrantedBlocks(areas, {FULL: PackedBlocks(pack_ids(sorted(ids)))})
    at = [100 + 1000 * (n % 2) + 30 * block + o for n, (block, o) in enumerate(starts)]
    expected = all(block in ids and 0 <= o <= 20 - size for block, o in _normalised(starts))
    assert holds(granted, at, (0, size)) == expected


def _normalised(starts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(block + o // 30, o % 30) for block, o in starts]


def test_other_regions_and_other_groups_are_not_granted() -> None:
    area = BlockArea(KV, FULL, 0, 64, 64, 1)
    granted = GrantedBlocks([area], {FULL: PackedBlocks(pack_ids([3]))})
    assert holds(granted, [3 * 64], (0, 64))
    assert not holds(granted, [3 * 64], (0, 64), RegionId("other"))
    other = GrantedBlocks([area], {GroupName("state"): PackedBlocks(pack_ids([3]))})
    assert not holds(other, [3 * 64], (0, 64))


@pytest.mark.parametrize(("extent", "held"), [((-32, 32), True), ((-33, 32), False), ((0, 65), False)])
def test_an_extent_may_begin_before_its_start(extent: tuple[int, int], held: bool) -> None:
    granted = GrantedBlocks([BlockArea(KV, FULL, 0, 64, 64, 1)], {FULL: PackedBlocks(pack_ids([3]))})
    assert holds(granted, [3 * 64 + 32], extent) == held


def test_neighbouring_tensors_of_one_page_are_one_area() -> None:
    """A page of two layers, 64 bytes each: a stretch may cross from one into the other."""
    tensors = tuple(
        CacheTensor(
            layer=layer,
            component="k",
            group=FULL,
            region=KV,
            offset=64 * layer,
            block_stride=128,
            token_stride=16,
            unit_stride=16,
            units=(UnitRange(0, 1),),
            chunk_bytes=16,
        )
        for layer in (0, 1)
    )
    group = Group(name=FULL, num_blocks=4, block_tokens=4)
    layout = RankLayout(
        start_layer=0, end_layer=2, groups=(group,), tensors=tensors, regions=(RegionSpec(KV, 512),)
    )
    assert block_areas(layout) == (BlockArea(KV, FULL, 0, 128, 128, 1),)
