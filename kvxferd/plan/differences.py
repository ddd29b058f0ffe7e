"""The fields in which two engines' caches differ, with both values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvxferd.ids import Rank
from kvxferd.layout import CacheTensor, EngineSpec, Group, RankLayout


class Difference(NamedTuple):
    """One field that both sides state with different values."""

    where: str  # "the engines", or "layer 3's component 'k'"
    field: str
    local: object
    remote: object

    def __str__(self) -> str:
        return f"{self.field} of {self.where} is {self.local!r} here and {self.remote!r} at the source"


# Fields that describe the model: two engines of one model have them equal, whatever their parallel sizes.
_ENGINE_FIELDS = ("fingerprint", "num_layers", "num_kv_heads")
_TENSOR_FIELDS = ("itemsize", "dtype", "encoding", "content_bytes", "granule_tokens", "kind")


def _tensor_facts(tensor: CacheTensor, group: Group) -> tuple[object, ...]:
    """Return the fields that must be equal on both sides for a tensor's content to be copied unchanged."""
    content_bytes = tensor.num_chunks * tensor.chunk_bytes
    return tensor.itemsize, tensor.dtype, tensor.encoding, content_bytes, tensor.granule_tokens, group.kind


def find_differences(
    spec: EngineSpec, layout: RankLayout, remote_spec: EngineSpec, remote: Mapping[Rank, RankLayout]
) -> list[Difference]:
    """Return every difference between two engines' models and cache tensors.

    A tensor's difference is listed once per component name and field, for the first layer that has it.
    """
    pairs = [(name, getattr(spec, name), getattr(remote_spec, name)) for name in _ENGINE_FIELDS]
    found = [Difference("the engines", *pair) for pair in pairs if pair[1] != pair[2]]
    groups = {group.name: group for group in layout.groups}
    mine = {
        (t.layer, t.component): (t, _tensor_facts(t, groups[t.group])) for t in layout.tensors if t.num_units
    }
    of_component: dict[tuple[str, str], Difference] = {}
    for rank in sorted(remote):
        remote_groups = {group.name: group for group in remote[rank].groups}
        for other in remote[rank].tensors:
            tensor, facts = mine.get((other.layer, other.component), (None, ()))
            if tensor is None or other.num_units == 0:
                continue
            other_facts = _tensor_facts(other, remote_groups[other.group])
            for name, here, there in zip(_TENSOR_FIELDS, facts, other_facts, strict=True):
                if here != there:
                    where = f"layer {tensor.layer}'s component {tensor.component!r}"
                    of_component.setdefault((tensor.component, name), Difference(where, name, here, there))
    return [*found, *of_component.values()]
