"""What planning and expansion cost: `python benchmarks/planning.py`. Prints; asserts nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from kvxferd.ids import GroupName, Rank, RegionId
from kvxferd.layout import PackedBlocks
from kvxferd.layout.presets import MODELS, deploy
from kvxferd.layout.validate import validate_layout
from kvxferd.plan import Expander, check_blocks, check_request, encode_plan, make_plan

NUM_BLOCKS = 8192
MODEL = MODELS["llama-3-70b"]
REPEATS = 7

# (what, sink (tp, pp, block tokens, layout), source, tokens)
CASES = [
    ("TP16 PP4 from TP8 PP1", (16, 4, 16, "HND"), (8, 1, 16, "HND"), 32_000),
    ("TP8 PP1 from TP16 PP4", (8, 1, 16, "HND"), (16, 4, 16, "HND"), 8_000),
    ("TP2 from TP4", (2, 1, 16, "HND"), (4, 1, 16, "HND"), 4_000),
    ("equal, scattered ids", (2, 1, 16, "HND"), (2, 1, 16, "HND"), 8_000),
    ("cross-layer from per-layer", (2, 1, 16, "HND-cross-layer"), (2, 1, 16, "HND"), 8_000),
    ("blocks of 12 from 16", (2, 1, 12, "HND"), (2, 1, 16, "HND"), 1_000),
    ("NHD from HND", (2, 1, 16, "NHD"), (2, 1, 16, "HND"), 125),
    ("NHD 32 from HND 16", (2, 1, 32, "NHD"), (4, 2, 16, "HND"), 125),
]


def best_ms(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the shortest of some runs, in milliseconds."""
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken) * 1000


def scattered(block_tokens: int, num_tokens: int, seed: int) -> dict[GroupName, PackedBlocks]:
    """Return a request's list with ids at random: nothing merges along the blocks."""
    ids = np.random.default_rng(seed).permutation(NUM_BLOCKS)[: -(-num_tokens // block_tokens)]
    return {GroupName("full"): PackedBlocks(ids.astype("<i4").tobytes())}


Chosen = tuple[int, int, int, str]


def measure(what: str, mine: Chosen, theirs: Chosen, num_tokens: int) -> str:
    """Return one case's line."""
    sink, source = (
        deploy(MODEL, tp=tp, pp=pp, block_tokens=tokens, layout=layout, num_blocks=NUM_BLOCKS)
        for tp, pp, tokens, layout in (mine, theirs)
    )
    spec, layout = sink[Rank(0, 0)]
    remote_spec = source[Rank(0, 0)][0]
    remote = {rank: held[1] for rank, held in source.items()}
    plan = make_plan(spec, layout, remote_spec, remote)
    local, published = scattered(mine[2], num_tokens, 1), scattered(theirs[2], num_tokens, 2)
    region = {RegionId("kv"): 1 << 40}
    request = (local, published, num_tokens, region, dict.fromkeys(remote, region))
    expander = Expander(plan)
    num_runs = sum(len(runs.local) for runs in expander.expand(*request).values())

    def checks() -> None:
        check_blocks(layout, local, num_tokens)
        check_request(plan, local, published, num_tokens)

    columns = [
        best_ms(lambda: make_plan(spec, layout, remote_spec, remote)),
        best_ms(checks),
        best_ms(lambda: Expander(plan).expand(*request)),
        best_ms(lambda: expander.expand(*request)),
    ]
    return (
        f"{what:28}"
        + "".join(f"{column:9.3f}" for column in columns)
        + f"{num_runs:9}{len(encode_plan(plan)):9}"
    )


def main() -> None:
    """Print one line per case; times are milliseconds."""
    heads = ("plan", "checks", "first", "expand", "runs", "bytes")
    print(f"{'one rank of llama-3-70b':28}" + "".join(f"{head:>9}" for head in heads))
    for case in CASES:
        print(measure(*case))
    spec, layout = deploy(MODEL, num_blocks=NUM_BLOCKS)[Rank(0, 0)]
    print(f"validating 80 layers: {best_ms(lambda: validate_layout(spec, layout)):.2f} ms")


if __name__ == "__main__":
    main()
