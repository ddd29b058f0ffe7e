"""Which blocks this node's movers may pack for readers: those of transfers under a live grant."""

from __future__ import annotations

from collections.abc import Iterable

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import SendToMover
from kvxferd.core.movers import Movers
from kvxferd.core.registry import LocalRank
from kvxferd.core.transfer_table import Transfer
from kvxferd.ids import AgentName, GrantId, Rank
from kvxferd.layout.areas import block_areas
from kvxferd.wire.mover import GrantBlocks, RevokeBlocks

# A quarter of a million tokens, in blocks of 16. A longer transfer is read in the other ways, so that one
# message keeps a mover's loop for a millisecond at most.
MAX_BLOCKS = 16 << 10
# Layers that lie apart, twice: 80 of k and of v are 160.
MAX_AREAS = 1024
# To one mover, of one transfer's blocks. The ranks of a reader may pull one after another, some of them
# twice. A peer that asks and releases in turn would else have a mover do nothing but read its blocks, and the
# daemon keep what it sends to one that is stopped.
MAX_SENDS = 64

_Key = tuple[AgentName, bytes]  # a source's agent, and a transfer's fence word


class GatherGrants:
    """Sends each mover a transfer's blocks before its first grant is answered, and takes them back."""

    def __init__(self, context: NodeContext, movers: Movers) -> None:
        self._context = context
        self._movers = movers
        self._grants: dict[_Key, set[GrantId]] = {}
        self._by_grant: dict[GrantId, tuple[_Key, ...]] = {}

    def grant(self, grant: GrantId, transfer: Transfer, ranks: Iterable[LocalRank]) -> tuple[Rank, ...]:
        """Have the ranks' movers pack the transfer's blocks; return the ranks whose movers do.

        A request that is sent again may name other ranks than before: these alone are packed from then on.
        """
        packing = []
        keys: list[_Key] = []
        for rank in ranks:
            if not rank.gathers or rank.agent is None:
                continue
            key = (rank.agent, transfer.fence_word)
            if key in self._grants or self._send_blocks(rank.agent, rank, transfer):
                self._grants.setdefault(key, set()).add(grant)
                keys.append(key)
                packing.append(rank.spec.rank)
        self._end_keys(grant, [key for key in self._by_grant.pop(grant, ()) if key not in keys])
        if keys:
            self._by_grant[grant] = tuple(keys)
        return tuple(packing)

    def end(self, grant: GrantId) -> None:
        """Take the blocks back where no other grant is on the transfer. Does nothing for an unknown grant."""
        self._end_keys(grant, self._by_grant.pop(grant, ()))

    def _end_keys(self, grant: GrantId, keys: Iterable[_Key]) -> None:
        for key in keys:
            holders = self._grants[key]
            holders.discard(grant)
            if not holders:
                del self._grants[key]
                agent, word = key
                if (mover := self._movers.get_by_agent(agent)) is not None:
                    self._context.emit(SendToMover(mover.mover_id, RevokeBlocks(word=word)))

    def _send_blocks(self, agent: AgentName, rank: LocalRank, transfer: Transfer) -> bool:
        if rank.block_areas is None:
            rank.block_areas = block_areas(rank.layout)
        areas = rank.block_areas
        per_id = {area.group: area.blocks_per_id for area in areas}
        blocks = {name: packed for name, packed in transfer.blocks.items() if name in per_id}
        num_blocks = sum(len(packed) * per_id[name] for name, packed in blocks.items())
        mover = self._movers.get_by_agent(agent)
        if mover is None or num_blocks > MAX_BLOCKS or len(areas) > MAX_AREAS:
            return False
        if transfer.num_block_sends[agent] >= MAX_SENDS:
            return False
        transfer.num_block_sends[agent] += 1
        message = GrantBlocks(word=transfer.fence_word, areas=areas, blocks=blocks)
        self._context.emit(SendToMover(mover.mover_id, message))
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError where the tables contradict each other."""
        if not self._by_grant and not self._grants:
            return
        held = {(key, grant) for grant, keys in self._by_grant.items() for key in keys}
        assert held == {(key, grant) for key, grants in self._grants.items() for grant in grants}
        assert all(self._grants.values())
