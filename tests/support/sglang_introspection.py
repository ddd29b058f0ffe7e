"""Asks SGLang itself, in its own interpreter; prints JSON. See tests/proofs/sglang/test_pools.py.

python sglang_introspection.py KIND,SOURCE_TP,SINK_TP,PAGE_TOKENS...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from kvxferd.client import BlockList
from kvxferd.ids import Rank
from kvxferd.integrations.sglang.layout.support import describe
from kvxferd.layout import EngineSpec, RankLayout, from_tensors, tensor_regions
from tests.support.in_process_pull import move

LAYERS, HEADS, WIDTH, PAGES, WINDOW = 4, 4, 8, 12, 40
FULL_LAYERS, WINDOW_LAYERS = (0, 3), (1, 2)


def contract() -> list[str]:
    """What the plugin's guard finds missing."""
    from kvxferd.integrations.sglang.contract import missing

    return list(missing())


def states() -> dict[str, int]:
    """SGLang's states of a transfer."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    return {name: value for name, value in vars(KVPoll).items() if isinstance(value, int)}


def pools() -> list[str]:
    """Every class of pools of SGLang's that holds keys and values of tokens."""
    import importlib
    import pkgutil

    from sglang.srt import mem_cache
    from sglang.srt.mem_cache.memory_pool import KVCache

    for module in pkgutil.iter_modules(mem_cache.__path__):
        importlib.import_module(f"sglang.srt.mem_cache.{module.name}")
    found, left = set(), [KVCache]
    while left:
        left += (subclasses := left.pop().__subclasses__())
        found |= {one.__name__ for one in subclasses if one.__module__.startswith("sglang.srt.mem_cache")}
    return sorted(found)


class Held(NamedTuple):
    """A rank's pool, and how it is described."""

    pool: Any
    layout: RankLayout
    storages: Any


def make_pool(kind: str, tp: int, page: int) -> Any:
    """One rank's pool, as SGLang makes it."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    common = {"page_size": page, "dtype": torch.float32, "device": "cpu", "enable_memory_saver": False}
    heads = {"head_num": HEADS // tp, "head_dim": WIDTH}
    match kind:
        case "latent":
            ranks = {"kv_lora_rank": WIDTH, "qk_rope_head_dim": 4}
            return MLATokenToKVPool((PAGES - 1) * page, layer_num=LAYERS, **ranks, **common)
        case "window":
            layers = {"swa_attention_layer_ids": WINDOW_LAYERS, "full_attention_layer_ids": FULL_LAYERS}
            size = {"size": (PAGES - 1) * page, "size_swa": (PAGES - 1) * page}
            return SWAKVPool(**size, **layers, **heads, **common)
        case _:
            return MHATokenToKVPool((PAGES - 1) * page, layer_num=LAYERS, **heads, **common)


def held(kind: str, tp: int, rank: int, page: int) -> tuple[EngineSpec, Held]:
    """A rank with its description."""
    pool = make_pool(kind, tp, page)
    spec = EngineSpec(f"tp{tp}", "g", LAYERS, tp_size=tp, tp_rank=rank, num_kv_heads=HEADS)
    described = describe(pool, WINDOW)
    layout = from_tensors(spec, described.tensors, described.groups, described.layers)
    storages = tensor_regions({name: named.tensor for name, named in described.tensors.items()})
    return spec, Held(pool, layout, storages)


def rows(pool: Any, kind: str, layer: int) -> Iterator[tuple[str, Any]]:
    """SGLang's own view of a layer: (component, rows of tokens)."""
    if kind == "latent":
        yield "latent", pool.get_key_buffer(layer)
    else:
        yield "k", pool.get_key_buffer(layer)
        yield "v", pool.get_value_buffer(layer)


def value(layer: int, component: str, head: int, token: int, width: int) -> torch.Tensor:
    """What stands in the cache of the whole model."""
    number = ((layer * 3 + len(component) + (component == "v")) * HEADS + head) * 1000 + token
    return number * 16.0 + torch.arange(width)


def moved(kind: str, source_tp: int, sink_tp: int, page: int) -> dict[str, int]:
    """Fill the ranks of a source through SGLang's own views, move, and look through them at each sink."""
    num_tokens = 5 * page
    published = {"full": [7, 2, 9, 4, 1], "window": [3, 8, 5, 6, 10]}
    into = {"full": [5, 1, 8, 2, 6], "window": [9, 4, 2, 7, 1]}
    groups = ("full", "window") if kind == "window" else ("full",)
    kept = {"full": 5, "window": -(-WINDOW // page) + 1}  # pages at the end that SGLang sends

    def lists(pages: dict[str, list[int]]) -> dict[str, BlockList]:
        return {
            name: BlockList(ids=pages[name][-kept[name] :], first_token=(5 - min(5, kept[name])) * page)
            for name in groups
        }

    def each(spec: EngineSpec, pool: Any, pages: dict[str, list[int]]) -> Iterator[tuple[Any, torch.Tensor]]:
        own = HEADS // spec.tp_size
        for layer in range(LAYERS):
            group = "window" if kind == "window" and layer in WINDOW_LAYERS else "full"
            first = 0 if group == "full" else max(0, num_tokens - WINDOW)
            for component, buffer in rows(pool, kind, layer):
                for token in range(first, num_tokens):
                    row = pages[group][token // page] * page + token % page
                    for head in range(buffer.shape[1]):
                        whole = spec.tp_rank * own + head if kind != "latent" else 0
                        yield buffer[row, head], value(layer, component, whole, token, buffer.shape[2])

    sources = {Rank(0, rank): held(kind, source_tp, rank, page) for rank in range(source_tp)}
    for spec, one in sources.values():
        for place, content in each(spec, one.pool, published):
            place.copy_(content)
    wrong, checked, runs = 0, 0, 0
    for rank in range(sink_tp):
        spec, sink = held(kind, sink_tp, rank, page)
        runs += move(
            spec,
            sink,
            sources[Rank(0, 0)][0],
            {rank: one for rank, (_, one) in sources.items()},
            into=lists(into),
            published=lists(published),
            num_tokens=num_tokens,
        )
        for place, content in each(spec, sink.pool, into):
            checked += 1
            wrong += not torch.equal(place, content)
        others = set(range(PAGES)) - set(into["full"])
        for _, buffer in rows(sink.pool, kind, FULL_LAYERS[0]):
            wrong += sum(bool(buffer[page * other : page * (other + 1)].any()) for other in others)
    return {"checked": checked, "wrong": wrong, "runs": runs}


if __name__ == "__main__":
    found: dict[str, object] = {"contract": contract(), "states": states(), "pools": pools()}
    for case in sys.argv[1:]:
        kind, *sizes = case.split(",")
        found[case] = moved(kind, *map(int, sizes))
    print(json.dumps(found))
