"""Windows of block lists: the ids that hold some of a request's tokens, and no others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvxferd.errors import Code, PeerError
from kvxferd.ids import GroupName
from kvxferd.layout import BlocksByGroup, GroupKind, PackedBlocks
from kvxferd.plan.block_list_checks import BlockRules
from kvxferd.plan.plan import BlockGeometry, Plan, block_geometry


@dataclass(frozen=True, slots=True)
class ListSide:
    """One side's block list of a group. `step_tokens`: a window begins at a multiple of so many tokens."""

    geometry: BlockGeometry
    step_tokens: int

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
        last = len(listed) if end is None else -(-(end - listed.first_token) // id_tokens)
        last = last if max_ids is None else min(last, first + max_ids)
        if not first and last >= len(listed) and isinstance(listed.ids, bytes):
            return listed  # nearly always: without a copy
        return PackedBlocks(bytes(listed.ids[4 * first : 4 * last]), listed.first_token + first * id_tokens)

    @property
    def is_state(self) -> bool:
        """Whether the list's last id is the request's state."""
        return self.geometry.kind is GroupKind.STATE

    def end_of(self, listed: PackedBlocks) -> int:
        """Return the token behind the last one listed."""
        return listed.first_token + len(listed) * self.geometry.id_tokens


def sides_of_rules(rules: BlockRules) -> dict[GroupName, ListSide]:
    """Return an engine's lists by group."""
    return _sides((block_geometry(group), granule) for group, granule in rules)


def source_sides(plan: Plan) -> dict[GroupName, ListSide]:
    """Return the source's lists that a plan reads, by the source's group."""
    return _sides((read.remote, read.granule_tokens) for read in plan.group_reads)


def _sides(found: Iterator[tuple[BlockGeometry, int]]) -> dict[GroupName, ListSide]:
    """Return one side of each group: a list may be cut where each of its rules and reads allows it."""
    sides: dict[GroupName, ListSide] = {}
    for side, granule in found:
        known = sides.get(side.group)
        period = side.shard.count * side.shard.interleave if side.shard.count > 1 else 1
        steps = (known.step_tokens if known else 1, granule, period, max(1, side.id_tokens))
        sides[side.group] = ListSide(side, math.lcm(*(max(1, step) for step in steps)))
    return sides


def first_tokens(plan: Plan, starts: Mapping[GroupName, int] | None) -> dict[GroupName, int]:
    """Return from which token on each of the source's groups is read.

    starts: the first token of each of the reader's lists that has blocks; None: it is not known which has.
    """
    found: dict[GroupName, int] = {}
    for read in plan.group_reads:
        if starts is not None and read.local.group not in starts:
            continue
        start = starts[read.local.group] if starts is not None and read.is_cut_by_tokens else 0
        found[read.remote.group] = min(found.get(read.remote.group, start), start)
    return found


def missing_tokens(
    plan: Plan, starts: Mapping[GroupName, int] | None, kept: Mapping[GroupName, PackedBlocks]
) -> dict[GroupName, int]:
    """Return from which token on the ids of each of the source's groups are needed yet.

    `starts`: as for `first_tokens`. `kept`: the source's ids that are here; a state may be another by now.
    """
    sides, found = source_sides(plan), first_tokens(plan, starts)
    for name, listed in kept.items():
        if name in found and listed.ids and not sides[name].is_state:
            found[name] = max(found[name], sides[name].end_of(listed))
    return found


def added_blocks(
    plan: Plan, kept: Mapping[GroupName, PackedBlocks], page: Mapping[GroupName, PackedBlocks]
) -> BlocksByGroup:
    """Return what a page has behind the ids that are here, of the groups that the plan reads.

    Raises PeerError for a page that does not begin where they end, or before.
    """
    added: BlocksByGroup = {}
    for name, side in source_sides(plan).items():
        if (listed := page.get(name)) is None:
            continue
        if len(listed.ids) % 4:
            raise PeerError(f"{len(listed.ids)} bytes of ids of group {name!r}", Code.BAD_FRAME)
        before = kept.get(name)
        if before is None or not before.ids or side.is_state or not listed.ids:
            added[name] = listed
            continue
        skip, odd = divmod(side.end_of(before) - listed.first_token, side.geometry.id_tokens)
        if odd or skip < 0:
            text = f"ids of group {name!r} from token {listed.first_token} on: those before end elsewhere"
            raise PeerError(text, Code.BAD_FRAME)
        added[name] = PackedBlocks(listed.ids[4 * skip :], side.end_of(before))
    return added


def source_windows(
    plan: Plan,
    listed: Mapping[GroupName, PackedBlocks],
    local: Mapping[GroupName, PackedBlocks],
    num_tokens: int,
) -> BlocksByGroup:
    """Return what the source's lists have of the tokens up to `num_tokens` that the reader's lists hold."""
    starts = {name: one.first_token for name, one in local.items() if one.ids}
    sides, nothing = source_sides(plan), PackedBlocks(b"")
    are_read_whole = {read.remote.group for read in plan.group_reads if not read.is_cut_by_tokens}
    windows = dict.fromkeys(sides, nothing)
    for name, start in first_tokens(plan, starts).items():
        end = None if name in are_read_whole else num_tokens
        windows[name] = sides[name].window(listed.get(name, nothing), start, end)
    return windows
