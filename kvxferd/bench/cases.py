"""One thing to move: which blocks of which deployment, on each side."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from kvxferd.bench.content import UNSTAMPED
from kvxferd.bench.shapes import FIRST_RANK, BenchDeployment, Role, footprint
from kvxferd.ids import GroupName, Rank, RegionId
from kvxferd.layout import BlocksByGroup, GroupKind, PackedBlocks
from kvxferd.plan import Expander, Runs, make_plan

BlockIds = npt.NDArray[np.int32]

BLOCKS_PER_RUN = 4


class BlockPattern(StrEnum):
    """How a request's blocks lie in the pool, on both sides."""

    CONTIGUOUS = "contiguous"
    FRAGMENTED = "fragmented"  # runs of four
    SCATTERED = "scattered"


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Pulls of one size: `slots` of them have no block in common and may run at the same time."""

    deployment: BenchDeployment
    lists: BlockPattern
    blocks: int  # ids of the attention group in one pull
    slots: int = 1
    first_block: int = 0  # where this case's part of the pool begins, for two cases side by side

    @property
    def num_tokens(self) -> int:
        """The tokens of one pull."""
        return self.blocks * footprint(self.deployment.layout()).block_tokens

    def blocks_of(self, role: Role) -> int:
        """Return the ids of the attention group in one pull on that side."""
        if self.deployment.sink is None or role == "source":
            return self.blocks
        return self.num_tokens // self.deployment.sink.block_tokens


def blocks_for(deployment: BenchDeployment, size_bytes: int) -> int:
    """Return the number of blocks that comes closest to a size; 0 if the states alone are larger."""
    of = footprint(deployment.layout())
    return max(0, round((size_bytes - of.state_bytes) / of.block_bytes))


def ids_per_pull(deployment: BenchDeployment, blocks: int) -> int:
    """Return how many ids of the pool one pull takes, all groups together, in whole runs of four."""
    total = blocks + footprint(deployment.layout()).num_state_groups
    return -(-total // BLOCKS_PER_RUN) * BLOCKS_PER_RUN


def block_lists(case: Case, role: Role, slot: int) -> dict[str, BlockIds]:
    """Return one pull's ids by group, on one side.

    Attention takes the first ids of the slot and each state group takes one of the rest: in a hybrid all
    of them are pages of one pool.
    """
    chosen = _pool_ids(case, role)
    blocks = case.blocks_of(role)
    taken = ids_per_pull(case.deployment, blocks)
    own = chosen[slot * taken : (slot + 1) * taken]
    lists: dict[str, BlockIds] = {}
    rest = blocks
    for group in case.deployment.layout().groups:
        if group.kind is GroupKind.STATE:
            lists[group.name] = own[rest : rest + 1]
            rest += 1
        else:
            lists[group.name] = own[:blocks]
    return lists


@lru_cache(maxsize=4)
def _pool_ids(case: Case, role: Role) -> BlockIds:
    """Return the ids of all slots in order."""
    needed = case.slots * ids_per_pull(case.deployment, case.blocks_of(role))
    room = case.deployment.pool_of(role) - case.first_block
    if needed > room:
        raise ValueError(f"cannot list {needed} blocks: the pool has {room}")
    if case.lists is BlockPattern.CONTIGUOUS:
        return np.arange(case.first_block, case.first_block + needed, dtype=np.int32)
    run = BLOCKS_PER_RUN if case.lists is BlockPattern.FRAGMENTED else 1
    # Each side has its own permutation of the pool: neighbours on one are not neighbours on the other.
    drawn = np.random.default_rng([run, role == "sink"]).permutation(room // run)[: needed // run]
    return (case.first_block + drawn[:, None] * run + np.arange(run)).ravel().astype(np.int32)


def packed_blocks(case: Case, role: Role, slot: int) -> BlocksByGroup:
    """Return one pull's lists as the planner takes them."""
    layout = case.deployment.layout()
    states = {group.name for group in layout.groups if group.kind is GroupKind.STATE}
    return {
        GroupName(name): PackedBlocks(ids=ids.tobytes(), state_at=case.num_tokens if name in states else -1)
        for name, ids in block_lists(case, role, slot).items()
    }


@lru_cache(maxsize=32)
def _expander(deployment: BenchDeployment, rank: Rank) -> Expander:
    sink_spec, sink_layout = deployment.engine("sink")[rank]
    source = deployment.engine("source")
    layouts = {remote: layout for remote, (_, layout) in source.items()}
    return Expander(make_plan(sink_spec, sink_layout, source[FIRST_RANK][0], layouts))


def reads_of(case: Case, rank: Rank, slot: int) -> Mapping[Rank, Runs]:
    """Return what one pull of a rank moves from each source rank, as offsets in the two regions."""
    expander = _expander(case.deployment, rank)
    mine = case.deployment.layout(rank, "sink")
    theirs = {
        source: {RegionId(region.region): 0 for region in layout.regions}
        for source, (_, layout) in case.deployment.engine("source").items()
    }
    return expander.expand(
        packed_blocks(case, "sink", slot),
        packed_blocks(case, "source", slot),
        case.num_tokens,
        {RegionId(region.region): 0 for region in mine.regions},
        theirs,
    )


def stamp_of(nonce: int, rank: Rank) -> int:
    """Return what a source rank stamps, so that bytes of another rank are found out."""
    return nonce if nonce == UNSTAMPED else nonce ^ (rank.pp_rank << 48 | rank.tp_rank << 32)


def readers_of(deployment: BenchDeployment, rank: Rank) -> list[Rank]:
    """Return the sink ranks that read from a source rank."""
    sinks = deployment.engine("sink")
    return [
        sink
        for sink in sinks
        if any(read.rank == rank for read in _expander(deployment, sink).plan.group_reads)
    ]


def runs_of(case: Case, rank: Rank, slot: int) -> Runs:
    """Return what one pull of a rank moves, as offsets in the two regions: sorted and merged.

    This is what the mover posts, up to the cutting of long runs. A rank reads its twin alone.
    """
    return reads_of(case, rank, slot)[rank]
