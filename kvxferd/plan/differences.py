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
_TENSOR_FIELDS = ("itemsize", "dtype", "encoding", "content_bytes", "granule_tokens")


def engine_differences(local: EngineSpec, remote: EngineSpec) -> list[Difference]:
    """Return the model facts in which two engines differ."""
    return [
        Difference("the engines", name, getattr(local, name), getattr(remote, name))
        for name in _ENGINE_FIELDS
        if getattr(local, name) != getattr(remote, name)
    ]


def tensor_facts(tensor: CacheTensor, group: Group) -> tuple[object, ...]:
    """Return the fields that must be equal on both sides for a tensor's content to be copied unchanged."""
    return (
        tensor.itemsize,
        tensor.dtype,
        tensor.encoding,
        tensor.num_chunks * tensor.chunk_bytes,
        tensor.granule_tokens,
        group.kind,
    )


def tensor_differences(
    tensor: CacheTensor, group: Group, remote: CacheTensor, remote_group: Group
) -> list[Difference]:
    """Return the fields in which two holders of one component of one layer differ."""
    where = f"layer {tensor.layer}'s component {tensor.component!r}"
    pairs = zip(tensor_facts(tensor, group), tensor_facts(remote, remote_group), strict=True)
    names = (*_TENSOR_FIELDS, "kind")
    return [
        Difference(where, name, mine, theirs)
        for name, (mine, theirs) in zip(names, pairs, strict=True)
        if mine != theirs
    ]


def find_differences(
    spec: EngineSpec, layout: RankLayout, remote_spec: EngineSpec, remote: Mapping[Rank, RankLayout]
) -> list[Difference]:
    """Return every difference between two engines' models and cache tensors.

    A tensor's difference is listed once per component name and field, for the first layer that has it.
    """
    found = engine_differences(spec, remote_spec)
    groups = {group.name: group for group in layout.groups}
    mine = {(t.layer, t.component): t for t in layout.tensors if t.num_units}
    seen: set[tuple[str, str]] = set()
    for rank in sorted(remote):
        remote_groups = {group.name: group for group in remote[rank].groups}
        for theirs in remote[rank].tensors:
            tensor = mine.get((theirs.layer, theirs.component))
            if tensor is None or theirs.num_units == 0:
                continue
            for difference in tensor_differences(
                tensor, groups[tensor.group], theirs, remote_groups[theirs.group]
            ):
                key = (tensor.component, difference.field)
                if key not in seen:
                    seen.add(key)
                    found.append(difference)
    return found
