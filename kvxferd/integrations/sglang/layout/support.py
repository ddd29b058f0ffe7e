"""Every pool of SGLang's, and its describer or why it is refused.

docs/reference/sglang-support.md is made from this table.

Names are exact: a subclass may keep its pages by another rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvxferd.errors import LayoutError
from kvxferd.integrations.sglang.layout.pools import (
    SUPPORT_PAGE,
    Describer,
    PoolDescription,
    keys_and_values,
    keys_and_values_of_windows,
    latents,
)

# Those that `make test-sglang` runs. Of another one the plugin asks for every name that it relies on.
SGLANG_VERSIONS = ("0.5.23",)


class PoolSupport(NamedTuple):
    """A pool of SGLang's: where `describer` is None it is refused, and `note` says why."""

    describer: Describer | None
    note: str
    proof: str = ""


_OWN_STATES = "its states have rows of their own beside the pages"
_SCALES = "blocks of scales lie beside its values"
_UNIFIED = "its pages lie by virtual ids in one memory that SGLang compacts"
_SHARDED = "each rank has some of the pages (context parallelism)"

POOLS: Mapping[str, PoolSupport] = {
    "MHATokenToKVPool": PoolSupport(
        keys_and_values, "keys and values: token first, or `SGLANG_USE_HND_KVCACHE=1`", "real pairs"
    ),
    "MLATokenToKVPool": PoolSupport(latents, "latents (DeepSeek's MLA)", "pools, without a model"),
    "SWAKVPool": PoolSupport(
        keys_and_values_of_windows, "layers with sliding windows beside others", "pools, without a model"
    ),
    **{
        name: PoolSupport(None, why)
        for why, names in {
            _OWN_STATES: ("HybridLinearKVPool", "QSATokenToKVPool", "DeepSeekV4TokenToKVPool"),
            _SCALES: ("MHATokenToKVPoolFP4", "MHATokenToKVPoolMXFP8", "MLATokenToKVPoolFP4"),
            "an indexer's keys lie beside its latents": ("DSATokenToKVPool", "LayerSplitDSATokenToKVPool"),
            "it has several caches for each layer": ("MiniMaxSparseKVPool", "MiniMaxM3Nvfp4KVPool"),
            "its pages are copies of host memory": ("HiSparseDSATokenToKVPool", "HiSparseMHAMainPool"),
            _UNIFIED: (
                "UnifiedMHATokenToKVPool",
                "UnifiedMLATokenToKVPool",
                "UnifiedHybridLinearKVPool",
                "UnifiedSWAKVPool",
            ),
            _SHARDED: (
                "PageInterleaveMHATokenToKVPool",
                "PageInterleaveMLATokenToKVPool",
                "PageInterleaveDSATokenToKVPool",
            ),
            "all layers of a page lie side by side, of which nothing was tried": (
                "PageMajorMHATokenToKVPool",
            ),
            "it keeps no cache": ("NoOpMHATokenToKVPool",),
            "it is a draft model's": ("UnifiedDraftKVPool", "UnifiedDraftSWAKVPool"),
            "it is a part of other pools": (
                "BaseSWAKVPool",
                "DeepSeekV4IndexerPool",
                "DeepSeekV4SingleKVPool",
                "DeepSeekV4UniformFP8KVPool",
                "HiSparseC4DevicePool",
                "MHATokenToKOnlyPool",
                "MiniMaxM3Nvfp4IndexKPool",
                "MiniMaxM3Nvfp4MainKVPool",
            ),
        }.items()
        for name in names
    },
}


def describe(pool: Any, window_tokens: int | None) -> PoolDescription:
    """Return the description of a rank's pool. `window_tokens`: of the model's sliding windows.

    Raises LayoutError for a pool that is not described, naming it and why.
    """
    name = type(pool).__name__
    support = POOLS.get(name, PoolSupport(None, "it is not known"))
    if support.describer is None:
        raise LayoutError(f"cannot describe SGLang's {name}: {support.note}; {SUPPORT_PAGE} has what moves")
    return support.describer(pool, window_tokens)
