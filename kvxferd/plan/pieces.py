"""The pieces in which a progressive pull is read: which tokens, and which part of its block lists."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvxferd.ids import GroupName
from kvxferd.layout import BlocksByGroup, PackedBlocks
from kvxferd.plan.block_list_checks import BlockRules
from kvxferd.plan.plan import Plan, block_geometry


class PieceRules:
    """How a plan's reads may be cut by tokens.

    Only groups that are cut by tokens on both sides are read in pieces: states and windows are read with the
    last piece.

    Attributes:
        step_tokens: pieces begin and end at multiples of so many tokens; 0: there is nothing to cut.
        reads_all: whether every group of the plan is read in pieces.
    """

    def __init__(self, plan: Plan) -> None:
        steps: dict[GroupName, set[int]] = {}
        whole: set[GroupName] = set()
        self._id_tokens: dict[GroupName, int] = {}
        for read in plan.group_reads:
            name = read.local.group
            if not read.is_cut_by_tokens:
                whole.add(name)
                continue
            self._id_tokens[name] = read.local.id_tokens
            shard = read.local.shard
            period = shard.count * shard.interleave if shard.count > 1 else 1
            steps.setdefault(name, set()).update((read.granule_tokens, read.local.id_tokens, period))
        for name in whole:
            self._id_tokens.pop(name, None)
        self.reads_all = not whole
        cut = [step for name in self._id_tokens for step in steps[name]]
        self.step_tokens = math.lcm(*cut) if cut else 0

    def slice(self, blocks: Mapping[GroupName, PackedBlocks], begin: int, end: int | None) -> BlocksByGroup:
        """Return the local lists of tokens [begin, end); with end None, of all that earlier pieces left."""
        return {name: self._slice_one(name, listed, begin, end) for name, listed in blocks.items()}

    def _slice_one(self, name: GroupName, listed: PackedBlocks, begin: int, end: int | None) -> PackedBlocks:
        id_tokens = self._id_tokens.get(name)
        if id_tokens is None:
            return listed if end is None else PackedBlocks(b"")
        start = max(begin, listed.first_token)
        first = (start - listed.first_token) // id_tokens
        last = len(listed) if end is None else max(first, -(-(end - listed.first_token) // id_tokens))
        ids = listed.ids[4 * first : 4 * last]
        return PackedBlocks(ids, listed.first_token + first * id_tokens) if ids else PackedBlocks(b"")


def covered_tokens(rules: BlockRules, blocks: Mapping[GroupName, PackedBlocks], num_tokens: int) -> int:
    """Return up to which token the lists hold every group that is read in pieces; 0 where none is."""
    ends = []
    for group, _ in rules:
        side = block_geometry(group)
        if side.is_cut_by_tokens:
            listed = blocks.get(group.name, PackedBlocks(b""))
            ends.append(listed.first_token + len(listed) * side.id_tokens if listed.ids else 0)
    return min([num_tokens, *ends]) if ends else 0
