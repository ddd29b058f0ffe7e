"""Plain attention engines for tables: every rank of a deployment, from the presets."""

from __future__ import annotations

from collections.abc import Sequence

from kvxferd.ids import EngineId, Generation, GroupName, Rank, RegionId
from kvxferd.layout import EngineSpec, PackedBlocks, RankLayout, pack_ids
from kvxferd.layout.presets import attention_layout
from kvxferd.plan import Expander, Plan, Runs, make_plan

FULL = GroupName("full")
KV = RegionId("kv")


def spec(
    *, tp: int = 1, pp: int = 1, heads: int = 4, layers: int = 2, rank: tuple[int, int] = (0, 0)
) -> EngineSpec:
    """Return the spec of one rank; `rank` is (pp_rank, tp_rank)."""
    return EngineSpec(
        EngineId("prefill"),
        Generation("g1"),
        layers,
        pp_size=pp,
        tp_size=tp,
        pp_rank=rank[0],
        tp_rank=rank[1],
        num_kv_heads=heads,
    )


def layout_of(
    own: EngineSpec, *, block_tokens: int = 4, layout: str = "HND", head_dim: int = 2, num_blocks: int = 16
) -> RankLayout:
    """Return the plain layout of a rank."""
    return attention_layout(
        spec=own,
        num_kv_heads=own.num_kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        layout=layout,
    )


def engine(
    *, tp: int = 1, pp: int = 1, heads: int = 4, layers: int = 2, block_tokens: int = 4, layout: str = "HND"
) -> dict[Rank, tuple[EngineSpec, RankLayout]]:
    """Return every rank of a deployment."""
    ranks = {}
    for rank in spec(tp=tp, pp=pp, heads=heads, layers=layers).ranks():
        own = spec(tp=tp, pp=pp, heads=heads, layers=layers, rank=rank)
        ranks[rank] = (own, layout_of(own, block_tokens=block_tokens, layout=layout))
    return ranks


def plan_between(
    sink: dict[Rank, tuple[EngineSpec, RankLayout]],
    source: dict[Rank, tuple[EngineSpec, RankLayout]],
    rank: tuple[int, int] = (0, 0),
) -> Plan:
    """Return the plan of one rank of `sink` against the whole of `source`."""
    own, layout = sink[Rank(*rank)]
    remote_spec = source[Rank(0, 0)][0]
    return make_plan(own, layout, remote_spec, {r: held[1] for r, held in source.items()})


def blocks(ids: Sequence[int], first_token: int = 0) -> dict[GroupName, PackedBlocks]:
    """Return a list of the one group that plain engines have."""
    return {FULL: PackedBlocks(pack_ids(list(ids)), first_token=first_token)}


def expand(
    plan: Plan, mine: Sequence[int], theirs: Sequence[int], first: tuple[int, int] = (0, 0)
) -> dict[Rank, Runs]:
    """Expand with local memory at 1,000,000 and each remote rank's at 2,000,000."""
    remote_bases = {rank: {KV: 2_000_000} for rank in plan.sources}
    local, remote = blocks(mine, first[0]), blocks(theirs, first[1])
    return Expander(plan).expand(local, remote, 1, {KV: 1_000_000}, remote_bases)


def listed(runs: Runs) -> list[tuple[int, int, int]]:
    """Return runs as (local offset, remote offset, length)."""
    columns = (runs.local - 1_000_000, runs.remote - 2_000_000, runs.length)
    return list(zip(*(column.tolist() for column in columns), strict=True))
