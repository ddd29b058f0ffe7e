"""A rank's layout from the tensors of its cache, the names of their dimensions, and their strides."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvxferd.errors import LayoutError
from kvxferd.ids import GroupName
from kvxferd.layout.engine import EngineSpec
from kvxferd.layout.sharding import shard_units, stage_layers
from kvxferd.layout.tensor_views import TensorLike, TensorRegion, TensorView, tensor_regions, tensor_view
from kvxferd.layout.tensors import (
    CacheTensor,
    Group,
    GroupKind,
    RankLayout,
    RegionSpec,
    UnitRange,
    num_units,
)
from kvxferd.layout.validate import MAX_BYTES, check_types, validate_layout, validate_spec

LAYER, KV, BLOCK, TOKEN, HEAD, HEAD_DIM = DIMENSIONS = ("layer", "kv", "block", "token", "head", "head_dim")
_DEFAULT_GROUP = GroupName("full")
_KEY_AND_VALUE = ("k", "v")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedTensor:
    """One tensor of a rank's cache, and what its dimensions mean.

    Attributes:
        tensor: the tensor, on the host or on a device: a torch tensor, or any object with its `data_ptr`,
            `shape`, `stride`, `element_size` and `dtype`.
        dims: a name for each dimension, in the tensor's order, as a list or separated by spaces:
            `block` (block ids; required), `token` (a block's tokens), `head` (the units that tensor
            parallelism divides), `head_dim` (the content of one head and token; may be named several
            times where the content has several dimensions), `kv` (the components, keys and values) and
            `layer`. Strides are the tensor's own, so any order and any padding will do.
        layers: the model's global index of the layer, or of each along `layer`. None: the layers of the
            rank's pipeline stage, divided as evenly as can be.
        components: what is cached, or what each along `kv` is: "k", "v", "latent", "conv.x", "ssm", ...
            Only equal names meet across engines. None: `("k", "v")` along `kv`.
        group: the group whose block ids index `block`. None: the only one.
        units: the global range of heads (or ranges) that this rank holds along `head`. None: this rank's
            share of the engine's `num_kv_heads`. Without `head` every rank holds one and the same unit.
        granule_tokens: tokens for each index of `token`: 16 for a scale per 16 tokens. Without `token` it
            is the whole block.
        encoding: compared like a dtype: a swizzle, a packing, a quantisation block.
    """

    tensor: TensorLike
    dims: str | Sequence[str]
    layers: int | Sequence[int] | None = None
    components: str | Sequence[str] | None = None
    group: str | None = None
    units: UnitRange | Sequence[UnitRange] | None = None
    granule_tokens: int = 1
    encoding: str = ""


def from_tensors(
    spec: EngineSpec,
    tensors: Mapping[str, NamedTensor],
    groups: Iterable[Group] | None = None,
    layers: range | None = None,
) -> RankLayout:
    """Return the layout of one rank, whose cache lies in these tensors. It has passed every check.

    Its regions are the allocations under the tensors, as `tensor_regions` returns them.

    Args:
        spec: the engine, and this rank's place in it.
        tensors: the cache's tensors, by a name that errors and regions carry.
        groups: the layers whose blocks are allocated together. None: one group, "full", of as many blocks
            and tokens a block as the tensors have.
        layers: the layers of this rank's pipeline stage. None: from the first to the last that a tensor
            holds; give it where the first or the last ones have no cache.

    Raises:
        LayoutError: the tensor and dimension that cannot be described, and what to do instead. Among them:
            a dimension that repeats its elements (stride 0), steps backwards, or overlaps another; sizes
            that are not the group's or the rank's; two tensors of a group that share bytes.
    """
    check_types(spec)
    validate_spec(spec)
    if not tensors or not isinstance(tensors, Mapping):
        raise LayoutError("cannot describe a cache without tensors: give a NamedTensor for each, by its name")
    for name, named in tensors.items():
        if not isinstance(named, NamedTensor):
            raise LayoutError(
                f"cannot describe tensor {name!r}: it is a {type(named).__name__}; "
                "give a NamedTensor(tensor=..., dims=...)"
            )
    regions = tensor_regions({name: named.tensor for name, named in tensors.items()})
    described = {name: _Described.of(name, named, regions) for name, named in tensors.items()}
    known = _inferred_groups(described) if groups is None else list(groups)
    found: dict[tuple[int, str], str] = {}
    cache_tensors: list[CacheTensor] = []
    for name, one in described.items():
        for tensor in one.cache_tensors(spec, _group_of(one, known)):
            key = (tensor.layer, tensor.component)
            if key in found:
                raise LayoutError(
                    f"cannot describe tensor {name!r}: layer {key[0]}'s component {key[1]!r} is tensor "
                    f"{found[key]!r} already; give each tensor its own layers or components"
                )
            found[key] = name
            cache_tensors.append(tensor)
    cache_tensors.sort(key=lambda tensor: (tensor.layer, tensor.component))
    stage = range(cache_tensors[0].layer, cache_tensors[-1].layer + 1) if layers is None else layers
    layout = RankLayout(
        start_layer=stage.start,
        end_layer=stage.stop,
        groups=tuple(known),
        tensors=tuple(cache_tensors),
        regions=tuple(RegionSpec(region.region, region.size_bytes) for region in regions),
    )
    _validate(spec, layout, found)
    return layout


def _validate(spec: EngineSpec, layout: RankLayout, names: Mapping[tuple[int, str], str]) -> None:
    """Check the layout; an error about a cache tensor names the engine's tensors too."""
    try:
        validate_layout(spec, layout)
    except LayoutError as error:
        about = [
            repr(name)
            for (layer, component), name in names.items()
            if f"layer {layer}'s component {component!r}" in error.message
        ]
        if not about:
            raise
        raise LayoutError(f"cannot describe tensor {' and '.join(about)}: {error.message}") from error


class _Dimension(NamedTuple):
    """One dimension of a tensor; the stride is bytes."""

    size: int
    stride: int


_ABSENT = _Dimension(1, 0)


class _Content(NamedTuple):
    """The bytes of one head and token: equal chunks, one stride apart."""

    num_chunks: int
    chunk_bytes: int
    chunk_stride: int


@dataclasses.dataclass(frozen=True)
class _Described:
    """A tensor whose dimensions have been read, and found usable by themselves."""

    name: str
    named: NamedTensor
    view: TensorView
    dims: Mapping[str, _Dimension]  # all but `head_dim`
    content: _Content

    @classmethod
    def of(cls, name: str, named: NamedTensor, regions: Sequence[TensorRegion]) -> _Described:
        """Read one tensor. Raises LayoutError."""
        address = named.tensor.data_ptr()
        try:
            region = next(r for r in regions if r.address <= address < r.end)
            view = tensor_view(named.tensor, region.region, region.address)
        except Exception as error:  # no strides (sparse), or an address outside its own storage
            raise _cannot(name, f"its place and strides cannot be read ({error!r})") from error
        names = _dimension_names(name, named.dims, view)
        _check_strides(name, names, view)
        sized = zip(names, view.shape, view.strides, strict=True)
        # The stride of a dimension of size 1 is never taken a step, and may be any number.
        listed = [(n, _Dimension(z, s if z > 1 or 0 <= s <= MAX_BYTES else 0)) for n, z, s in sized]
        content = _content_of(name, [dim for n, dim in listed if n == HEAD_DIM], view.itemsize)
        return cls(name, named, view, {n: dim for n, dim in listed if n != HEAD_DIM}, content)

    def cache_tensors(self, spec: EngineSpec, group: Group) -> list[CacheTensor]:
        """Return the cache tensors, one for each layer and component. Raises LayoutError."""
        granule = self._granule_tokens(group)
        self._check_blocks(group, granule)
        kv, layer = self.dims.get(KV, _ABSENT), self.dims.get(LAYER, _ABSENT)
        units = self._units(spec)
        head, token = self.dims.get(HEAD, _ABSENT), self.dims.get(TOKEN, _ABSENT)
        return [
            CacheTensor(
                layer=layer_index,
                component=component,
                group=group.name,
                region=self.view.region,
                offset=self.view.offset + at_layer * layer.stride + at_component * kv.stride,
                block_stride=self.dims[BLOCK].stride,
                token_stride=token.stride,
                unit_stride=head.stride,
                units=units,
                chunk_bytes=self.content.chunk_bytes,
                num_chunks=self.content.num_chunks,
                chunk_stride=self.content.chunk_stride,
                granule_tokens=granule,
                itemsize=self.view.itemsize,
                dtype=str(self.named.tensor.dtype).removeprefix("torch."),
                encoding=self.named.encoding,
            )
            for at_layer, layer_index in enumerate(self._layers(spec))
            for at_component, component in enumerate(self._components())
        ]

    def _layers(self, spec: EngineSpec) -> Sequence[int]:
        given = self.named.layers
        size = self.dims[LAYER].size if LAYER in self.dims else 1
        if given is None:
            given = range(*stage_layers(spec.num_layers, spec.pp_size, spec.pp_rank))
            whose = f"stage {spec.pp_rank} of {spec.pp_size} has {len(given)} of the engine's layers"
        elif isinstance(given, int):
            given, whose = (given,), "one is given"
        else:
            given = tuple(int(layer) for layer in given)
            whose = f"{len(given)} are given"
        if len(given) != size:
            raise self._cannot(f"it holds {_count(LAYER, size)} and {whose}; set layers=", LAYER)
        return given

    def _components(self) -> Sequence[str]:
        given = self.named.components
        size = self.dims[KV].size if KV in self.dims else 1
        if given is None:
            if KV not in self.dims:
                raise self._cannot("it has no dimension kv, so name what it holds: set components='k'")
            given = _KEY_AND_VALUE
        names = (given,) if isinstance(given, str) else tuple(given)
        if len(names) != size:
            raise self._cannot(
                f"it holds {_count(KV, size)} and {len(names)} are named, {names}; set components=",
                KV,
            )
        return names

    def _units(self, spec: EngineSpec) -> tuple[UnitRange, ...]:
        given = self.named.units
        if HEAD not in self.dims and given is None:
            return (UnitRange(0, 1),)
        size = self.dims[HEAD].size if HEAD in self.dims else 1
        if given is not None:
            units = (given,) if isinstance(given, UnitRange) else tuple(given)
            whose = "units= lists"
        elif spec.num_kv_heads == 0 and spec.tp_size == 1:
            return (UnitRange(0, size),)
        else:
            units = shard_units(spec.num_kv_heads, spec.tp_size, spec.tp_rank)
            whose = (
                f"rank {spec.tp_rank} of {spec.tp_size} has, of the engine's {spec.num_kv_heads} KV heads,"
            )
        if num_units(units) != size:
            raise self._cannot(
                f"it holds {_count(HEAD, size)} and {whose} {num_units(units)}; set num_kv_heads of the "
                "engine, or units= to the global range that this rank holds",
                HEAD,
            )
        return units

    def _granule_tokens(self, group: Group) -> int:
        if TOKEN in self.dims or group.kind is GroupKind.STATE:
            return self.named.granule_tokens
        return max(1, group.block_tokens // max(1, group.physical_blocks_per_logical))

    def _check_blocks(self, group: Group, granule: int) -> None:
        """Check that the tensor has the group's blocks and tokens. Raises LayoutError."""
        per_id = group.physical_blocks_per_logical
        if (size := self.dims[BLOCK].size) != group.num_blocks * per_id:
            raise self._cannot(
                f"it has {size} blocks, and group {group.name!r} has {group.num_blocks} of {per_id} each; "
                "give the part of the tensor that the block ids index, or set num_blocks",
                BLOCK,
            )
        if group.kind is GroupKind.STATE:
            if TOKEN in self.dims:
                raise self._cannot(
                    f"a block of the state group {group.name!r} has no tokens; rename it", TOKEN
                )
            return
        tokens = (self.dims[TOKEN].size if TOKEN in self.dims else 1) * granule
        if tokens * per_id != group.block_tokens:
            raise self._cannot(
                f"its blocks hold {tokens} tokens, and group {group.name!r} has {group.block_tokens} in "
                f"{per_id} of them; set block_tokens of the group, or granule_tokens",
                TOKEN,
            )

    def _cannot(self, why: str, dimension: str = "") -> LayoutError:
        shown = dimension if dimension in self.dims else ""
        return _cannot(self.name, why, shown)


def _dimension_names(name: str, dims: str | Sequence[str], view: TensorView) -> list[str]:
    """Return the names of a tensor's dimensions. Raises LayoutError."""
    names = dims.split() if isinstance(dims, str) else list(dims)
    if len(names) != len(view.shape):
        raise _cannot(
            name,
            f"it has {len(view.shape)} dimensions, of shape {view.shape}, and {len(names)} are named, "
            f"{' '.join(map(str, names))!r}; name each one",
        )
    for position, dimension in enumerate(names):
        if dimension not in DIMENSIONS:
            raise _cannot(name, f"there are only {', '.join(DIMENSIONS)}", dimension)
        if dimension in names[:position] and dimension != HEAD_DIM:
            raise _cannot(name, "it is named twice; only head_dim may be", dimension)
    if BLOCK not in names:
        raise _cannot(name, "no dimension is named block, by which block ids find their bytes; name one")
    return names


def _check_strides(name: str, names: Sequence[str], view: TensorView) -> None:
    """Check that no dimension repeats its elements or steps backwards. Raises LayoutError."""
    for dimension, size, stride in zip(names, view.shape, view.strides, strict=True):
        if size < 1:
            raise _cannot(name, "it is empty; leave the tensor out", dimension)
        if size > 1 and stride <= 0:
            why = "flipped" if stride else "expanded, so that its indexes are one and the same memory"
            raise _cannot(name, f"it is {why}; give a copy of its own (tensor.contiguous())", dimension)


def _content_of(name: str, dims: Sequence[_Dimension], itemsize: int) -> _Content:
    """Return where the content of one head and token lies. Raises LayoutError for too many parts."""
    merged: list[_Dimension] = []
    for dim in (dim for dim in dims if dim.size > 1):
        if merged and merged[-1].stride == dim.size * dim.stride:
            merged[-1] = _Dimension(merged[-1].size * dim.size, dim.stride)
        else:
            merged.append(dim)
    contiguous = merged.pop().size if merged and merged[-1].stride == itemsize else 1
    if len(merged) > 1:
        strides = ", ".join(str(dim.stride) for dim in merged)
        raise _cannot(
            name,
            f"its content lies in pieces that are {strides} bytes apart, and one distance goes; name the "
            "dimensions of head_dim so that all but one of them are contiguous",
            HEAD_DIM,
        )
    chunks = merged[0] if merged else _ABSENT
    return _Content(chunks.size, contiguous * itemsize, chunks.stride if chunks.size > 1 else 0)


def _inferred_groups(described: Mapping[str, _Described]) -> list[Group]:
    """Return the one group that all tensors are in. Raises LayoutError where they do not agree."""
    found: dict[tuple[int, int], str] = {}
    for name, one in described.items():
        if one.named.group not in (None, _DEFAULT_GROUP):
            raise _cannot(name, f"its group {one.named.group!r} is not described; give groups=")
        if TOKEN not in one.dims:
            raise _cannot(name, "without a dimension token its blocks' tokens are not known; give groups=")
        found.setdefault((one.dims[BLOCK].size, one.dims[TOKEN].size * one.named.granule_tokens), name)
    if len(found) > 1:
        kinds = [f"{name!r} has {blocks} of {tokens} tokens" for (blocks, tokens), name in found.items()]
        raise LayoutError(f"cannot describe the tensors in one group, as blocks differ: {', '.join(kinds)}; "
                          "give groups=, and each tensor its group")  # fmt: skip
    ((num_blocks, block_tokens),) = found
    return [Group(_DEFAULT_GROUP, num_blocks, block_tokens)]


def _group_of(one: _Described, groups: Sequence[Group]) -> Group:
    wanted = one.named.group
    if wanted is None and len(groups) == 1:
        return groups[0]
    for group in groups:
        if group.name == wanted:
            return group
    names = ", ".join(repr(str(group.name)) for group in groups)
    given = "no group is named" if wanted is None else f"there is no group {wanted!r}"
    raise _cannot(one.name, f"{given}; set group= to one of {names}")


def _count(dimension: str, size: int) -> str:
    what = {LAYER: "layer", KV: "component", HEAD: "head"}[dimension]
    return f"{size} {what}{'s' if size != 1 else ''}"


def _cannot(name: str, why: str, dimension: str = "") -> LayoutError:
    where = f", dimension {dimension!r}" if dimension else ""
    return LayoutError(f"cannot describe tensor {name!r}{where}: {why}")
