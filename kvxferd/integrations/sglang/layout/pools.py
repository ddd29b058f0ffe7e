"""Describers: from one of SGLang's pools to named tensors and groups. Shapes are those of its tensors.

Of a pool with a row for each token, whole pages are described; page 0 is SGLang's padding, and moves nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from kvxferd.engine import Group, NamedTensor
from kvxferd.errors import LayoutError
from kvxferd.ids import GroupName
from kvxferd.layout import GroupKind

SUPPORT_PAGE = "docs/reference/sglang-support.md"
FULL, WINDOW, AUX = "full", "window", "aux"


@dataclass(frozen=True)
class PoolDescription:
    """A rank's pool.

    Attributes:
        tensors: by a name that errors carry.
        groups: of the tensors.
        layers: of the rank's pipeline stage.
        states: the group of each kind of indices that SGLang sends beside the pages, by its `StateType`.
    """

    tensors: dict[str, NamedTensor]
    groups: list[Group]
    layers: range
    states: dict[str, str] = field(default_factory=dict)


# Takes the pool, and the tokens of the model's sliding windows.
Describer = Callable[[Any, int | None], PoolDescription]


def keys_and_values(pool: Any, _window_tokens: int | None = None) -> PoolDescription:
    """Describe an `MHATokenToKVPool`: a tensor for the keys and one for the values of each layer."""
    return PoolDescription(
        _key_and_value_tensors(pool, pool.model_layer_ids, FULL), [_group(pool, FULL)], _stage(pool)
    )


def latents(pool: Any, _window_tokens: int | None = None) -> PoolDescription:
    """Describe an `MLATokenToKVPool`: one latent for each token and layer, the same on every rank."""
    if pool.kv_scale_buffer is not None or pool.use_dsa:
        raise _cannot(pool, "its latents have scales or an indexer beside them")
    tensors = {
        f"latent.{layer}": NamedTensor(
            tensor=_in_pages(tensor, pool.page_size).squeeze(2),
            dims="block token head_dim",
            layers=layer,
            components="latent",
            group=FULL,
            encoding=_encoding(pool),
        )
        for layer, tensor in zip(pool.model_layer_ids, pool.kv_buffer, strict=True)
    }
    return PoolDescription(tensors, [_group(pool, FULL)], _stage(pool))


def keys_and_values_of_windows(pool: Any, window_tokens: int | None) -> PoolDescription:
    """Describe an `SWAKVPool`: layers with all tokens, and layers with the last ones alone."""
    parts = ((pool.full_kv_pool, FULL), (pool.swa_kv_pool, WINDOW))
    for part, _ in parts:
        if type(part).__name__ != "MHATokenToKVPool":
            raise _cannot(pool, f"its part {type(part).__name__} is not described")
    tensors = {
        name: tensor
        for part, group in parts
        for name, tensor in _key_and_value_tensors(part, part.model_layer_ids, group).items()
    }
    groups = [_group(pool.full_kv_pool, FULL), _group(pool.swa_kv_pool, WINDOW, window_tokens)]
    layers = sorted(layer for part, _ in parts for layer in part.model_layer_ids)
    return PoolDescription(tensors, groups, range(layers[0], layers[-1] + 1), {"swa": WINDOW})


def of_stage(described: PoolDescription, stage: int) -> PoolDescription:
    """Return the description with names of groups that no other stage has: each has pages of its own."""
    if stage == 0:
        return described
    names = {str(group.name): f"{group.name}.{stage}" for group in described.groups}
    return PoolDescription(
        {key: replace(one, group=names[str(one.group)]) for key, one in described.tensors.items()},
        [msgspec.structs.replace(group, name=GroupName(names[group.name])) for group in described.groups],
        described.layers,
        {kind: names[group] for kind, group in described.states.items()},
    )


def aux_tensors(rows: dict[str, Any], layer: int) -> tuple[dict[str, NamedTensor], Group]:
    """Return SGLang's metadata of each request (its first token and others) as a state, beside one layer.

    `rows`: tensors of shape (requests, numbers), by their names.
    """
    tensors = {
        f"{AUX}.{name}": NamedTensor(
            tensor=tensor, dims="block head_dim", layers=layer, components=f"{AUX}.{name}", group=AUX
        )
        for name, tensor in rows.items()
    }
    return tensors, Group(AUX, len(next(iter(rows.values()))), kind=GroupKind.STATE)


def _key_and_value_tensors(pool: Any, layers: Sequence[int], group: str) -> dict[str, NamedTensor]:
    if pool.is_quantized_kv_cache:
        raise _cannot(pool, f"its keys and values are quantised with blocks of scales ({pool.quant_method})")
    is_page_first = {"nhd": False, "hnd": True}.get(pool.kv_cache_layout)
    if is_page_first is None:
        raise _cannot(pool, f"its layout is {pool.kv_cache_layout}")
    dims = "block head token head_dim" if is_page_first else "block token head head_dim"
    return {
        f"{component}.{layer}": NamedTensor(
            tensor=tensor if is_page_first else _in_pages(tensor, pool.page_size),
            dims=dims,
            layers=layer,
            components=component,
            group=group,
            encoding=_encoding(pool),
        )
        for component, buffers in (("k", pool.k_buffer), ("v", pool.v_buffer))
        for layer, tensor in zip(layers, buffers, strict=True)
    }


def _in_pages(tensor: Any, page_tokens: int) -> Any:
    """Return (rows, ...) as (pages, page_tokens, ...), without the rows behind the last whole page."""
    pages = len(tensor) // page_tokens
    return tensor[: pages * page_tokens].unflatten(0, (pages, page_tokens))


def _group(pool: Any, name: str, window_tokens: int | None = None) -> Group:
    pages = (pool.size + pool.page_size) // pool.page_size
    return Group(name, pages, block_tokens=pool.page_size, sliding_window=window_tokens)


def _stage(pool: Any) -> range:
    return range(pool.start_layer, pool.start_layer + pool.layer_num)


def _encoding(pool: Any) -> str:
    """Return the type of what is stored as bytes: an 8-bit float of either kind."""
    return "" if pool.dtype == pool.store_dtype else str(pool.dtype).removeprefix("torch.")


def _cannot(pool: Any, why: str) -> LayoutError:
    return LayoutError(
        f"cannot describe SGLang's {type(pool).__name__}: {why}; {SUPPORT_PAGE} has what moves"
    )
