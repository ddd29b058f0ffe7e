"""Windows of block lists: the ids that hold some of a request's tokens, and no others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvxferd.errors import Code, PeerError
from kvxferd.ids import GroupName
from kvxferd.layout import BlocksByGroup, GroupKind, PackedBlocks
from kvxferd.plan.block_list_checks import MAX_TOKENS, BlockRules
from kvxferd.plan.plan import BlockGeometry, Plan

_NOTHING = PackedBlocks(b"")


@dataclass(frozen=True, slots=True)
class ListRules:
    """How a group's block list may be cut: a window begins at a multiple of `step_tokens`."""

    geometry: BlockGeometry
    step_tokens: int

    @property
    def is_state(self) -> bool:
        """Whether the list's last id is the request's state, which is all that is read of it."""
        return self.geometry.kind is GroupKind.STATE

    def window(
        self, listed: PackedBlocks, begin: int, end: int | None = None, max_ids: int | None = None
    ) -> PackedBlocks:
        """Return the ids that hold tokens [begin, end), all with end None; of a state, the last id.

        `max_ids`: the first so many of them.
        """
        if self.is_state:
            return PackedBlocks(bytes(listed.ids[-4:]), listed.first_token, listed.state_at)
        id_tokens = self.geometry.id_tokens
        skipped = max(0, begin - listed.first_token) // self.step_tokens * self.step_tokens
        first = min(len(listed), skipped // id_tokens)
        last = len(listed) if end is None else max(first, -(-(end - listed.first_token) // id_tokens))
        last = last if max_ids is None else min(last, first + max_ids)
        # Nearly always that is all of a list: then neither copies its bytes.
        return PackedBlocks(bytes(listed.ids[4 * first : 4 * last]), listed.first_token + first * id_tokens)


def list_rules(rules: BlockRules) -> dict[GroupName, ListRules]:
    """Return how an engine's lists may be cut, by group."""
    return _by_group(rules)


def _by_group(found: Iterable[tuple[BlockGeometry, int]]) -> dict[GroupName, ListRules]:
    """Return one entry for each group: a list may be cut where each of its rules or reads allows it."""
    by_group: dict[GroupName, ListRules] = {}
    for side, granule in found:
        known = by_group.get(side.group)
        steps = (known.step_tokens if known else 1, granule, side.period_tokens, side.id_tokens)
        by_group[side.group] = ListRules(side, math.lcm(*(max(1, step) for step in steps)))
    return by_group


class SourceLists:
    """The source's block lists that a plan reads."""

    def __init__(self, plan: Plan) -> None:
        # The groups that each reads, and whether their lists are cut by tokens.
        self._reads = [(one.local.group, one.remote.group, one.is_cut_by_tokens) for one in plan.group_reads]
        self.rules = _by_group((read.remote, read.granule_tokens) for read in plan.group_reads)
        self.states = {name for name, rules in self.rules.items() if rules.is_state}

    def missing(
        self, starts: Mapping[GroupName, int] | None, kept: Mapping[GroupName, PackedBlocks]
    ) -> dict[GroupName, int]:
        """Return from which token on the ids of each group are needed yet.

        starts: the first token of each of the reader's lists that has blocks; None: it is not known yet
            which will have. kept: the ids that are here. A state may be another one by now.
        """
        found = self._first_tokens(starts)
        for name, listed in kept.items():
            if name in found and listed.ids and name not in self.states:
                found[name] = max(found[name], self.rules[name].geometry.end_of(listed))
        return found

    def _first_tokens(self, starts: Mapping[GroupName, int] | None) -> dict[GroupName, int]:
        found: dict[GroupName, int] = {}
        for local, remote, is_cut in self._reads:
            if starts is not None and local not in starts:
                continue
            start = starts[local] if starts is not None and is_cut else 0
            found[remote] = min(found.get(remote, start), start)
        return found

    def added(
        self, kept: Mapping[GroupName, PackedBlocks], page: Mapping[GroupName, PackedBlocks]
    ) -> BlocksByGroup:
        """Return what a page has behind the ids that are here, and of states the new one.

        Raises PeerError for a page that begins behind the end of what is here, or is no list.
        """
        added: BlocksByGroup = {}
        for name, rules in self.rules.items():
            if (listed := page.get(name)) is None:
                continue
            if len(listed.ids) % 4 or not 0 <= listed.first_token <= MAX_TOKENS:
                text = f"{len(listed.ids)} bytes of ids of group {name!r} from token {listed.first_token} on"
                raise PeerError(text, Code.BAD_FRAME)
            before = kept.get(name, _NOTHING)
            if not before.ids or rules.is_state or not listed.ids:
                added[name] = listed
                continue
            skip, odd = divmod(rules.geometry.end_of(before) - listed.first_token, rules.geometry.id_tokens)
            if odd or skip < 0:
                text = f"ids of group {name!r} from token {listed.first_token} on: those before end elsewhere"
                raise PeerError(text, Code.BAD_FRAME)
            added[name] = PackedBlocks(listed.ids[4 * skip :], rules.geometry.end_of(before))
        return added

    def windows(
        self,
        listed: Mapping[GroupName, PackedBlocks],
        local: Mapping[GroupName, PackedBlocks],
        num_tokens: int,
    ) -> BlocksByGroup:
        """Return what the lists have of the tokens up to `num_tokens` that the reader's lists hold."""
        starts = {name: one.first_token for name, one in local.items() if one.ids}
        are_read_whole = {remote for _, remote, is_cut in self._reads if not is_cut}
        windows = dict.fromkeys(self.rules, _NOTHING)
        for name, start in self._first_tokens(starts).items():
            end = None if name in are_read_whole else num_tokens
            windows[name] = self.rules[name].window(listed.get(name, _NOTHING), start, end)
        return windows
