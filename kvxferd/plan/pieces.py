"""The pieces in which a progressive pull is read: which tokens, and which part of its block lists."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvxferd.ids import GroupName
from kvxferd.layout import BlocksByGroup, PackedBlocks
from kvxferd.plan.block_list_checks import BlockRules
from kvxferd.plan.block_windows import ListRules
from kvxferd.plan.plan import Plan


class PieceRules:
    """How a plan's reads may be cut by tokens.

    Only groups that are cut by tokens on both sides are read in pieces: states and windows are read with the
    last piece.

    Attributes:
        step_tokens: pieces begin and end at multiples of so many tokens; 0: there is nothing to cut.
        reads_all: whether every group of the plan is read in pieces.
    """

    def __init__(self, plan: Plan) -> None:
        steps: dict[GroupName, list[int]] = {}
        self._rules: dict[GroupName, ListRules] = {}
        for read in plan.group_reads:
            side = read.local
            steps.setdefault(side.group, []).extend(
                (read.granule_tokens, side.id_tokens, side.period_tokens) if read.is_cut_by_tokens else (0,)
            )
            self._rules[side.group] = ListRules(side, side.id_tokens)
        cut = {name: math.lcm(*found) for name, found in steps.items() if all(found)}
        self._rules = {name: self._rules[name] for name in cut}
        self.reads_all = len(cut) == len(steps)
        self.step_tokens = math.lcm(*cut.values()) if cut else 0

    def slice(self, blocks: Mapping[GroupName, PackedBlocks], begin: int, end: int | None) -> BlocksByGroup:
        """Return the local lists of tokens [begin, end); with end None, of all that earlier pieces left."""
        last = blocks if end is None else dict.fromkeys(blocks, PackedBlocks(b""))
        return {
            name: self._rules[name].window(listed, begin, end) if name in self._rules else last[name]
            for name, listed in blocks.items()
        }


def covered_tokens(rules: BlockRules, blocks: Mapping[GroupName, PackedBlocks], num_tokens: int) -> int:
    """Return up to which token the lists hold every group that is read in pieces; 0 where none is."""
    ends = []
    for side, _ in rules:
        if side.is_cut_by_tokens:
            listed = blocks.get(side.group, PackedBlocks(b""))
            ends.append(side.end_of(listed) if listed.ids else 0)
    return min([num_tokens, *ends]) if ends else 0
