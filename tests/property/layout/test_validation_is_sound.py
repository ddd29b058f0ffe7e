"""What validation lets through lies in bounds and shares no byte, checked place by place."""

from __future__ import annotations

import collections

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvxferd.errors import LayoutError
from kvxferd.layout import Group, GroupKind, RankLayout
from kvxferd.layout.validate import validate_layout
from tests.support.layout_strategies import engines, models

FIELDS = [
    "offset",
    "block_stride",
    "token_stride",
    "unit_stride",
    "chunk_stride",
    "chunk_bytes",
    "num_chunks",
]


def is_sound(layout: RankLayout) -> bool:
    """Write every byte of every valid block out: in bounds, and nobody else's within the group."""
    groups = {group.name: group for group in layout.groups}
    sizes = {region.region: region.size_bytes for region in layout.regions}
    named: dict[tuple[str, str], collections.Counter[int]] = {}
    for tensor in layout.tensors:
        count = named.setdefault((tensor.group, tensor.region), collections.Counter())
        blocks, items = _axes(groups[tensor.group], tensor.granule_tokens)
        for block in range(blocks):
            for item in range(items):
                for unit in range(tensor.num_units):
                    start = tensor.offset + block * tensor.block_stride + item * tensor.token_stride
                    start += unit * tensor.unit_stride
                    for chunk in range(tensor.num_chunks):
                        at = start + chunk * tensor.chunk_stride
                        if tensor.chunk_bytes and at + tensor.chunk_bytes > sizes[tensor.region]:
                            return False
                        count.update(range(at, at + tensor.chunk_bytes))
    return all(times == 1 for count in named.values() for times in count.values())


def _axes(group: Group, granule: int) -> tuple[int, int]:
    per_id = group.physical_blocks_per_logical
    items = 1 if group.kind is GroupKind.STATE else group.block_tokens // per_id // granule
    return group.num_blocks * per_id, items


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(st.data())
def test_accepted_layouts_are_sound(data: st.DataObject) -> None:
    """A valid layout with one number of one tensor changed: what is accepted is sound."""
    engine = data.draw(engines(data.draw(models()), "e"))
    rank = data.draw(st.sampled_from(sorted(engine.ranks)))
    layout = engine.ranks[rank]
    spoilt = [index for index, tensor in enumerate(layout.tensors) if tensor.num_units]
    if spoilt:
        index = data.draw(st.sampled_from(spoilt))
        tensor = layout.tensors[index]
        field = data.draw(st.sampled_from(FIELDS))
        value = max(0, getattr(tensor, field) + data.draw(st.integers(-3, 3)))
        tensors = list(layout.tensors)
        tensors[index] = msgspec.structs.replace(tensor, **{field: value})
        layout = msgspec.structs.replace(layout, tensors=tuple(tensors))
    try:
        validate_layout(engine.spec_of(rank), layout)
    except LayoutError:
        event("refused")
    else:
        event("accepted")
        assert is_sound(layout)
