"""Checks of a request's block lists: the rank's own, and those that the source published."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvxferd.errors import Code, EngineError, PlanError
from kvxferd.ids import GroupName
from kvxferd.layout import (
    GroupKind,
    PackedBlocks,
    RankLayout,
    check_continues,
    unpack_ids,
)
from kvxferd.plan.plan import BlockGeometry, GroupRead, Plan, block_geometry

# Expansion counts in int64. A million-token prompt is 2**20.
MAX_TOKENS = 1 << 48
# A 16M-token request at page size 1: 128 MiB of arrays on each side.
MAX_KERNEL_BLOCKS = 1 << 24
# An array operation costs more than a loop over so few ids.
MAX_IDS_WITHOUT_NUMPY = 64


def ids_as_int32(blocks: PackedBlocks) -> npt.NDArray[np.int32]:
    """Return a list's ids as int32, without a copy."""
    return np.frombuffer(blocks.ids, dtype="<i4")


def check_first_token(side: BlockGeometry, granule_tokens: int, blocks: PackedBlocks) -> None:
    """Raise EngineError (blocks-invalid) for a list that begins inside an item or a period of the shards."""
    for step, what in ((granule_tokens, "granule"), (side.period_tokens, "turn over the token shards")):
        if blocks.first_token % step:
            raise EngineError(
                f"cannot use the blocks of group {side.group!r}: first_token {blocks.first_token} is no "
                f"multiple of its {what}, {step} tokens",
                Code.BLOCKS_INVALID,
            )


class GroupRule(NamedTuple):
    """The limits of a rank's block lists of one group."""

    side: BlockGeometry
    granule_tokens: int  # a list may not be cut between so many tokens


class IdScans:
    """What is read of each list of ids, once for all rules and ranks that it is checked by.

    An engine may have 4,096 ranks with a rule each, and a list 4 million ids: a scan takes 3 ms, a sort 40.
    """

    def __init__(self) -> None:
        # By identity, which holds while the lists are there: in one check.
        self._extremes: dict[int, tuple[int, int]] = {}
        self._repeated: dict[int, int | None] = {}

    def extremes(self, listed: PackedBlocks) -> tuple[int, int]:
        """Return the smallest and the largest id of a list that has one."""
        if (known := self._extremes.get(id(listed))) is None:
            if len(listed) <= MAX_IDS_WITHOUT_NUMPY:
                few = unpack_ids(listed.ids).tolist()
                known = min(few), max(few)
                if len(set(few)) == len(few):
                    self._repeated[id(listed)] = None
            else:
                ids = ids_as_int32(listed)
                known = int(ids.min()), int(ids.max())
            self._extremes[id(listed)] = known
        return known

    def repeated(self, listed: PackedBlocks) -> int | None:
        """Return the smallest id that is listed twice."""
        if id(listed) not in self._repeated:
            self._repeated[id(listed)] = duplicate_id(listed)
        return self._repeated[id(listed)]


BlockRules = tuple[GroupRule, ...]  # one for each group; ranks with equal ones take the same lists


def block_rules(layout: RankLayout) -> BlockRules:
    """Return what `check_blocks` needs of a layout. Computed once, because it reads every tensor."""
    granules: dict[GroupName, set[int]] = {group.name: set() for group in layout.groups}
    for tensor in layout.tensors:
        granules[tensor.group].add(tensor.granule_tokens)
    return tuple(GroupRule(block_geometry(group), math.lcm(*granules[group.name])) for group in layout.groups)


def engine_rules(ranks: Iterable[BlockRules]) -> BlockRules:
    """Return every different rule among an engine's ranks: its stages may hold different groups.

    Ranks that share a group's tokens differ in the shard's index alone, and no list depends on that.
    """
    rules = {_with_first_shard(rule): None for of_rank in ranks for rule in of_rank}
    return tuple(rules)


def _with_first_shard(rule: GroupRule) -> GroupRule:
    first = msgspec.structs.replace(rule.side.shard, index=0)
    return rule._replace(side=msgspec.structs.replace(rule.side, shard=first))


def check_blocks(
    rules: BlockRules,
    blocks: Mapping[GroupName, PackedBlocks],
    num_tokens: int,
    whose: str = "this rank's",
) -> None:
    """Raise EngineError (blocks-invalid) unless `blocks` can hold a request of `num_tokens` by these rules.

    Every group must be listed. An empty list is legal: nothing of the group is published, or all of it is
    there already. In a state group only the last id counts. Of an engine, every rule of each group holds.
    """
    if num_tokens < 1:
        raise blocks_invalid(f"cannot use num_tokens {num_tokens}: a request has at least 1 token")
    groups = {rule.side.group for rule in rules}
    if groups != blocks.keys():
        unknown, missing = sorted(blocks.keys() - groups), sorted(groups - blocks.keys())
        if unknown:
            raise blocks_invalid(
                f"cannot use blocks of group {unknown[0]!r}: {whose} groups are {_quote_names(groups)}"
            )
        raise blocks_invalid(f"cannot do without blocks of group {missing[0]!r}: an empty list would do")
    scans = IdScans()
    for side, granule_tokens in rules:
        _check_list(side, blocks[side.group], num_tokens, granule_tokens, scans)


def check_open_blocks(
    rules: BlockRules,
    blocks: Mapping[GroupName, PackedBlocks],
    num_tokens: int,
    added: Mapping[GroupName, PackedBlocks] | None = None,
) -> None:
    """Check the lists of a request that grows to `num_tokens`.

    A list may be empty until the last part comes; then each group has one. `added` are the last ids of lists
    whose other ids were checked before: then those alone are checked, in a time that does not grow with the
    lists. An id that is in two parts is found when its list is complete. Raises EngineError (blocks-invalid).
    """
    parts = blocks if added is None else added
    if unknown := parts.keys() - {rule.side.group for rule in rules}:
        raise blocks_invalid(f"cannot use blocks of group {min(unknown)!r}: the engine has no such group")
    scans = IdScans()
    for side, granule_tokens in rules:
        part = parts.get(side.group)
        if part is None or not part.ids:
            continue
        listed = blocks[side.group]
        if side.kind is GroupKind.STATE:
            _check_list(side, listed, num_tokens, granule_tokens, scans)
            continue
        end, is_first = side.end_of(listed), len(listed.ids) == len(part.ids)
        if part.first_token and not is_first:
            check_continues(side.group, end - len(part) * side.id_tokens, part)
        if end < num_tokens and not is_first:
            _check_end(side, listed, end)
            _check_ids(side, part, scans)
            _check_no_id_twice(side, part, scans)
        else:
            upto = max(min(end, num_tokens), listed.first_token + 1)
            _check_list(side, listed, upto, granule_tokens, scans)


def has_all_blocks(rules: BlockRules, blocks: Mapping[GroupName, PackedBlocks], num_tokens: int) -> bool:
    """Whether the lists of a request hold all of it, of every group: no blocks are to be added."""
    for side, _ in rules:
        listed = blocks.get(side.group, PackedBlocks(b""))
        if not listed.ids or (side.kind is not GroupKind.STATE and side.end_of(listed) < num_tokens):
            return False
    return True


def check_request(
    plan: Plan,
    local: Mapping[GroupName, PackedBlocks],
    remote: Mapping[GroupName, PackedBlocks],
    num_tokens: int,
) -> None:
    """Raise unless the source's lists hold every token that the local ones require.

    The local lists have passed `check_blocks`. Each local group with blocks requires the tokens from
    ``max(first_token, num_tokens - sliding_window)`` to `num_tokens`; a state group requires the
    state at `num_tokens`. Raises PlanError (tokens-not-published) naming the group and the tokens,
    and EngineError (blocks-invalid) for ids that the source cannot have.
    """
    seen: set[tuple[BlockGeometry, BlockGeometry, int]] = set()
    scans = IdScans()
    for read in plan.group_reads:
        key = (read.local, read.remote, read.granule_tokens)
        if key not in seen:
            seen.add(key)
            _check_group_read(read, local, remote, num_tokens, scans)


def _check_group_read(
    read: GroupRead,
    local: Mapping[GroupName, PackedBlocks],
    remote: Mapping[GroupName, PackedBlocks],
    num_tokens: int,
    scans: IdScans,
) -> None:
    """Check the two lists of one group read."""
    mine = local[read.local.group]
    if not mine.ids:
        return
    theirs = remote.get(read.remote.group, PackedBlocks(b""))
    _check_ids(read.remote, theirs, scans)
    if read.remote.kind is GroupKind.ATTENTION:
        _check_end(read.remote, theirs, read.remote.end_of(theirs))
        check_first_token(read.remote, read.granule_tokens, theirs)
    if read.local.kind is GroupKind.STATE:
        if not theirs.ids or theirs.state_at != num_tokens:
            has = f"its state at token {theirs.state_at}" if theirs.ids else "no state"
            raise _not_published(read, f"the state at token {num_tokens} is needed, and {has} is published")
        return
    window = read.local.sliding_window
    start = mine.first_token if window is None else max(mine.first_token, num_tokens - window)
    published = theirs.first_token, read.remote.end_of(theirs)
    if start < num_tokens and not (published[0] <= start and num_tokens <= published[1]):
        has = f"[{published[0]}, {published[1]})" if theirs.ids else "none"
        raise _not_published(read, f"tokens [{start}, {num_tokens}) are needed, and {has} are published")


def _check_list(
    side: BlockGeometry, listed: PackedBlocks, num_tokens: int, granule: int, scans: IdScans
) -> None:
    """Check one group's list by itself."""
    _check_ids(side, listed, scans)
    if not listed.ids:
        return
    if side.kind is GroupKind.STATE:
        if listed.state_at != num_tokens:
            raise blocks_invalid(
                f"cannot use the state of group {side.group!r}: it stands at token {listed.state_at}, "
                f"and the request has {num_tokens} tokens"
            )
        return
    _check_end(side, listed, side.end_of(listed))
    check_first_token(side, granule, listed)
    needed = max(0, -(-(num_tokens - listed.first_token) // side.id_tokens))
    if len(listed) != needed:
        raise blocks_invalid(
            f"cannot use the {len(listed)} blocks of group {side.group!r}: tokens "
            f"[{listed.first_token}, {num_tokens}) at {side.id_tokens} a block take {needed}"
        )
    _check_no_id_twice(side, listed, scans)


def _check_no_id_twice(side: BlockGeometry, listed: PackedBlocks, scans: IdScans) -> None:
    repeated = scans.repeated(listed)
    if repeated is not None:
        raise blocks_invalid(f"cannot use block {repeated} of group {side.group!r} twice in one request")


def duplicate_id(listed: PackedBlocks) -> int | None:
    """Return the smallest id that is listed twice."""
    if len(listed) <= MAX_IDS_WITHOUT_NUMPY:
        few = unpack_ids(listed.ids).tolist()
        if len(set(few)) == len(few):
            return None
        return next(a for a, b in itertools.pairwise(sorted(few)) if a == b)
    ids = ids_as_int32(listed)
    if (ids[1:] > ids[:-1]).all():
        return None  # in order, as a new allocator hands them out
    ids = np.sort(ids)
    repeated = np.flatnonzero(ids[1:] == ids[:-1])
    return int(ids[repeated[0]]) if len(repeated) else None


def _check_ids(side: BlockGeometry, listed: PackedBlocks, scans: IdScans) -> None:
    """Check that a list begins at a token, and that its ids are whole int32 and in range."""
    if listed.first_token < 0:
        raise blocks_invalid(
            f"cannot use first_token {listed.first_token} of group {side.group!r}: it is negative"
        )
    if len(listed.ids) % 4:
        raise blocks_invalid(
            f"cannot read the ids of group {side.group!r}: {len(listed.ids)} bytes are no whole number of "
            "int32"
        )
    if not listed.ids:
        return
    for worst in scans.extremes(listed):
        if not 0 <= worst < side.num_blocks:
            raise blocks_invalid(
                f"cannot use block {worst} of group {side.group!r}: its ids are 0 to {side.num_blocks - 1}"
            )


def _check_end(side: BlockGeometry, listed: PackedBlocks, end: int) -> None:
    """Check that the list's kernel blocks can be counted and its tokens numbered without overflow."""
    if end > MAX_TOKENS or len(listed) * side.blocks_per_id > MAX_KERNEL_BLOCKS:
        raise blocks_invalid(
            f"cannot use the {len(listed)} blocks of group {side.group!r}: they end at token {end}, at "
            f"{side.blocks_per_id} kernel blocks each; the limits are {MAX_TOKENS} and {MAX_KERNEL_BLOCKS}"
        )


def blocks_invalid(message: str) -> EngineError:
    return EngineError(message, Code.BLOCKS_INVALID)


def _not_published(read: GroupRead, what: str) -> PlanError:
    return PlanError(
        f"cannot fill group {read.local.group!r} from the source's group {read.remote.group!r}: {what}",
        Code.TOKENS_NOT_PUBLISHED,
    )


def _quote_names(groups: Iterable[GroupName]) -> str:
    return ", ".join(map(repr, sorted(groups)))
