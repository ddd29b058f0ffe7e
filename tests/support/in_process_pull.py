"""A pull between derived caches in this process: by plan and runs, with memmove in the mover's place."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from kvxferd.client import BlockList
from kvxferd.client.arguments import pack_blocks
from kvxferd.ids import Rank, RegionId
from kvxferd.integrations.vllm.layout.derivation import DerivedCaches
from kvxferd.layout import EngineSpec
from kvxferd.layout.validate import validate_layout
from kvxferd.plan import Expander, block_rules, check_blocks, check_request, make_plan


def addresses(derived: DerivedCaches) -> dict[RegionId, int]:
    """Return where each region begins."""
    return {one.region: one.address for one in derived.storages}


def move(
    spec: EngineSpec,
    own: DerivedCaches,
    source_spec: EngineSpec,
    source: Mapping[Rank, DerivedCaches],
    *,
    into: Mapping[str, BlockList],
    published: Mapping[str, BlockList],
    num_tokens: int,
) -> int:
    """Read what was published into one rank's blocks, as a daemon and its mover do. Returns the runs."""
    mine, theirs = pack_blocks(into, None, "pull"), pack_blocks(published, None, "publish")
    validate_layout(spec, own.layout)
    check_blocks(block_rules(own.layout), mine, num_tokens)
    for derived in source.values():
        check_blocks(block_rules(derived.layout), theirs, num_tokens)
    plan = make_plan(spec, own.layout, source_spec, {rank: d.layout for rank, d in source.items()})
    check_request(plan, mine, theirs, num_tokens)
    bases = {rank: addresses(derived) for rank, derived in source.items()}
    moved = Expander(plan).expand(mine, theirs, num_tokens, addresses(own), bases)
    for runs in moved.values():
        for to, origin, length in np.stack(runs, axis=1).tolist():
            ctypes.memmove(to, origin, length)
    return sum(len(runs.length) for runs in moved.values())
