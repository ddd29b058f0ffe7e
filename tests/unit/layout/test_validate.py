"""A layout that contradicts itself, its engine or its regions is refused in words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvxferd.errors import Code, LayoutError
from kvxferd.ids import EngineId, Generation, GroupName, RegionId
from kvxferd.layout import EngineSpec, Group, GroupKind, RankLayout, RegionSpec, TokenShard, UnitRange
from kvxferd.layout.presets import attention_layout
from kvxferd.layout.validate import MAX_GROUPS, MAX_REGIONS, validate_layout

SPEC = EngineSpec(
    EngineId("e"), Generation("g"), 4, pp_size=2, tp_size=2, pp_rank=1, tp_rank=1, num_kv_heads=4
)
STATE = Group(GroupName("state"), num_blocks=4, kind=GroupKind.STATE)


def plain() -> RankLayout:
    """Return layers 2 and 3, two heads of 16 bytes, 8 blocks of 4 tokens; K and V of 1,024 bytes each."""
    return attention_layout(spec=SPEC, num_kv_heads=4, head_dim=8, block_tokens=4, num_blocks=8)


def with_tensor(index: int = 0, **changes: Any) -> RankLayout:
    """Return the plain layout with one tensor changed."""
    layout = plain()
    tensors = list(layout.tensors)
    tensors[index] = msgspec.structs.replace(tensors[index], **changes)
    return msgspec.structs.replace(layout, tensors=tuple(tensors))


def with_group(*, granule_tokens: int = 1, **changes: Any) -> RankLayout:
    """Return the plain layout with its group changed, and with items of so many tokens."""
    layout = plain()
    groups = (msgspec.structs.replace(layout.groups[0], **changes),)
    tensors = tuple(msgspec.structs.replace(t, granule_tokens=granule_tokens) for t in layout.tensors)
    return msgspec.structs.replace(layout, groups=groups, tensors=tensors)


def with_state(**changes: Any) -> RankLayout:
    """Return a layout of one state tensor of 4 blocks."""
    layout = with_tensor(group=STATE.name, token_stride=0)
    state = msgspec.structs.replace(layout.tensors[0], granule_tokens=changes.pop("granule_tokens", 1))
    return msgspec.structs.replace(
        layout, groups=(msgspec.structs.replace(STATE, **changes),), tensors=(state,)
    )


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        # --- outside the region
        (with_tensor(3, offset=3073), ["layer 3", "'v'", "block, 7", "4097", "'kv'", "4096"]),
        (with_tensor(3, block_stride=1 << 20), ["reaches to byte", "4096"]),
        (with_tensor(offset=-1), ["offset -1"]),
        (with_tensor(block_stride=-64), ["block_stride -64"]),
        (with_tensor(token_stride=-16), ["token_stride -16"]),
        (with_tensor(unit_stride=1 << 60), ["unit_stride 1152921504606846976"]),
        # --- overlaps in a group
        (with_tensor(0, block_stride=64), ["layer 2's component 'k'", "itself"]),
        (with_tensor(0, token_stride=8), ["layer 2's component 'k'", "itself"]),
        (with_tensor(0, unit_stride=32), ["layer 2's component 'k'", "itself"]),
        (with_tensor(1, offset=960), ["layer 2's component", "overlaps", "'full'"]),
        (with_tensor(0, num_chunks=2), ["overlaps itself"]),  # chunk_stride 0
        # --- names
        (with_tensor(group=GroupName("other")), ["no group 'other'"]),
        (with_tensor(region=RegionId("other")), ["no region 'other'"]),
        (with_tensor(1, component="k"), ["layer 2's component 'k'", "twice"]),
        (with_tensor(component="k" * 257), ["component", "257 characters"]),
        (with_tensor(component=""), ["component", "0 characters"]),
        (with_tensor(encoding="x" * 257), ["encoding", "256"]),
        (with_group(name=GroupName("")), ["group name"]),
        # --- layers
        (with_tensor(layer=1), ["layer 1's component 'k'", "[2, 4)"]),
        (with_tensor(layer=4), ["layer 4", "[2, 4)"]),
        (msgspec.structs.replace(plain(), end_layer=5), ["[2, 5)", "[0, 4)"]),
        (msgspec.structs.replace(plain(), start_layer=-1), ["[-1, 4)"]),
        (msgspec.structs.replace(plain(), start_layer=4, end_layer=2), ["[4, 2)"]),
        # --- units
        (with_tensor(units=(UnitRange(2, 2), UnitRange(3, 4))), ["[2, 2) is empty"]),
        (with_tensor(units=(UnitRange(4, 2),)), ["[4, 2) is empty"]),
        (with_tensor(units=(UnitRange(2, 4), UnitRange(3, 4))), ["units [3, 4)", "twice"]),
        (with_tensor(units=(UnitRange(-2, 0),)), ["[-2, 0)"]),
        # --- sizes
        (with_tensor(chunk_bytes=1 << 50), ["chunk_bytes"]),
        (with_tensor(num_chunks=0), ["num_chunks 0"]),
        (with_tensor(itemsize=0), ["itemsize 0"]),
        (with_tensor(granule_tokens=0), ["granule_tokens 0"]),
        (with_tensor(granule_tokens=3), ["granule_tokens 3", "4 tokens"]),
        (with_group(num_blocks=0), ["num_blocks 0"]),
        (with_group(num_blocks=1 << 40), ["num_blocks"]),
        (with_group(block_tokens=0), ["block_tokens 0"]),
        (with_group(block_tokens=1 << 21), ["block_tokens 2097152"]),
        (with_group(sliding_window=0), ["sliding_window 0"]),
        (with_group(physical_blocks_per_logical=3), ["physical_blocks_per_logical 3", "block_tokens 4"]),
        (with_group(physical_blocks_per_logical=0), ["physical_blocks_per_logical 0"]),
        # twice as many kernel blocks, each of half the tokens, do not fit where blocks were whole
        (with_group(physical_blocks_per_logical=2), ["reaches to byte"]),
        (with_group(token_shard=TokenShard(2, 2, 1)), ["index 2"]),
        (with_group(token_shard=TokenShard(0, 0, 1)), ["count 0"]),
        (with_group(token_shard=TokenShard(2, 0, 3)), ["interleave 3", "4 tokens"]),
        (with_group(token_shard=TokenShard(2, 0, 2), granule_tokens=4), ["interleave 2"]),
        (msgspec.structs.replace(plain(), regions=(RegionSpec(RegionId("kv"), 0),)), ["'kv'", "0 bytes"]),
        (msgspec.structs.replace(plain(), regions=plain().regions * 2), ["region 'kv'", "twice"]),
        (msgspec.structs.replace(plain(), groups=plain().groups * 2), ["group 'full'", "twice"]),
        # --- states have no tokens
        (with_state(block_tokens=4), ["'state'", "block_tokens is 4"]),
        (with_state(physical_blocks_per_logical=2), ["'state'", "physical_blocks_per_logical is 2"]),
        (with_state(token_shard=TokenShard(2, 0, 1)), ["'state'", "token_shard.count is 2"]),
        (with_state(granule_tokens=4), ["granule_tokens is 4"]),
        (with_state(num_blocks=33), ["block, 32", "reaches to byte"]),
    ],
)
def test_contradictions_are_refused_by_name(layout: RankLayout, words: list[str]) -> None:
    """The message names the place and the numbers."""
    with pytest.raises(LayoutError) as caught:
        validate_layout(SPEC, layout)
    assert caught.value.code is Code.LAYOUT_INVALID
    assert caught.value.message.startswith("cannot ")
    assert [word for word in words if word not in caught.value.message] == []


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"pp_rank": 2}, Code.RANK_INVALID, "pp_rank 2"),
        ({"tp_rank": -1}, Code.RANK_INVALID, "tp_rank -1"),
        ({"tp_rank": 2}, Code.RANK_INVALID, "tp_rank 2"),
        ({"tp_size": 0}, Code.RANK_INVALID, "tp_size 0"),
        ({"num_layers": 0}, Code.RANK_INVALID, "num_layers 0"),
        ({"pp_size": 65}, Code.RANK_INVALID, "pp_size 65"),
        ({"pp_size": 64, "tp_size": 65}, Code.RANK_INVALID, "pp_size x tp_size 4160"),
        ({"num_kv_heads": -1}, Code.LAYOUT_INVALID, "num_kv_heads -1"),
        ({"engine_id": EngineId("")}, Code.LAYOUT_INVALID, "engine_id"),
        ({"fingerprint": "x" * 300}, Code.LAYOUT_INVALID, "fingerprint"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(changes: dict[str, Any], code: Code, words: str) -> None:
    """The engine's own numbers come first."""
    with pytest.raises(LayoutError, match=words) as caught:
        validate_layout(msgspec.structs.replace(SPEC, **changes), plain())
    assert caught.value.code is code


@pytest.mark.parametrize("changes", [{"units": ()}, {"units": (UnitRange(0, 0),)}, {"chunk_bytes": 0}])
def test_components_without_width_are_legal(changes: dict[str, Any]) -> None:
    """Models without B/C groups: no bytes, so nothing to lie anywhere."""
    validate_layout(SPEC, with_tensor(1, offset=10**9, **changes))


@pytest.mark.parametrize("what", ["groups", "regions"])
def test_more_than_a_rank_may_have_is_refused_before_each_is_looked_at(what: str) -> None:
    layout = plain()
    (one,) = getattr(layout, what)
    many = (one,) * (1 + {"groups": MAX_GROUPS, "regions": MAX_REGIONS}[what])  # each listed twice, too
    with pytest.raises(LayoutError, match=f"{len(many)} {what}"):
        validate_layout(SPEC, msgspec.structs.replace(layout, **{what: many}))
