"""Which remote rank each unit is read from, and the proof that every unit is read exactly once."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import NamedTuple

from kvxferd.ids import Rank
from kvxferd.layout import TokenShard, UnitRange


class RankShare(NamedTuple):
    """One remote rank's share of a component of a layer."""

    rank: Rank
    units: tuple[UnitRange, ...]
    shard: TokenShard


class Fragment(NamedTuple):
    """Units ``[first_unit, first_unit + num_units)``, consecutive on both sides, read from `rank`.

    The indexes are positions among the units that each side holds.
    """

    rank: Rank
    first_unit: int
    num_units: int
    local_index: int
    remote_index: int


class Gap(NamedTuple):
    """The first units, and which of their tokens, that no rank holds. `shard` is None for all tokens."""

    first_unit: int
    end_unit: int
    shard: TokenShard | None


class _Span(NamedTuple):
    """A contiguous range of units inside one share."""

    start: int
    stop: int
    position: int  # of `start` among the holder's units
    holder: RankShare


def preferred_rank(tp_rank: int, tp_size: int, remote_tp_size: int) -> int:
    """Return the remote tensor-parallel rank from which a reader searches for holders, upwards.

    Readers are spread over replicas this way: each reads its own part of equal holders.
    """
    return tp_rank * remote_tp_size // tp_size


def choose_holder(ranks: Iterable[Rank], preferred: int) -> Rank:
    """Return the lowest of `ranks` whose tp_rank is at least `preferred`, else the lowest."""
    return min(ranks, key=lambda rank: (rank.tp_rank < preferred, rank.tp_rank, rank.pp_rank))


def needed_shards(local: TokenShard, remote: TokenShard) -> tuple[int, ...]:
    """Return which of the remote's token shards hold tokens of the local one, in ascending order."""
    return tuple(
        sorted({token // remote.interleave % remote.count for token in _local_tokens(local, remote)})
    )


def shared_fraction(local: TokenShard, remote: TokenShard) -> Fraction:
    """Return the fraction of a sequence's tokens that both shards hold, 0 to 1, exact."""
    both = sum(t // remote.interleave % remote.count == remote.index for t in _local_tokens(local, remote))
    return Fraction(both, common_period_steps(local, remote))


def common_period_steps(local: TokenShard, remote: TokenShard) -> int:
    """Return the common period of both interleavings, in gcd-sized steps."""
    period = math.lcm(local.count * local.interleave, remote.count * remote.interleave)
    return period // math.gcd(local.interleave, remote.interleave)


def _local_tokens(local: TokenShard, remote: TokenShard) -> Iterator[int]:
    """Yield the local tokens of one common period, one for each gcd-sized step."""
    step = math.gcd(local.interleave, remote.interleave)
    for token in range(0, common_period_steps(local, remote) * step, step):
        if token // local.interleave % local.count == local.index:
            yield token


def assign_units(
    units: tuple[UnitRange, ...], shard: TokenShard, shares: tuple[RankShare, ...], preferred: int
) -> tuple[list[Fragment], Gap | None]:
    """Return the fragments in which `units` are read, and the first gap, if any.

    Without a gap the fragments cover every local unit exactly once per token shard needed. All
    shares must have the same shard count and interleave.
    """
    cuts, covers = _spans_between_cuts([span for share in shares for span in _spans(share)])
    needed = needed_shards(shard, shares[0].shard) if shares else (0,)
    fragments: list[Fragment] = []
    local_index = 0
    for held in units:
        for at in range(bisect.bisect_right(cuts, held.start) - 1, bisect.bisect_left(cuts, held.stop)):
            start = max(held.start, cuts[at]) if at >= 0 else held.start
            stop = min(held.stop, cuts[at + 1]) if at + 1 < len(cuts) else held.stop
            over = covers[at] if 0 <= at < len(covers) else []
            for index in needed:
                holders = {span.holder.rank: span for span in over if span.holder.shard.index == index}
                if not holders:
                    return fragments, Gap(start, stop, _missing_shard(shares, index))
                span = holders[choose_holder(holders, preferred)]
                position = span.position + start - span.start
                fragments.append(Fragment(span.holder.rank, start, stop - start, local_index, position))
            local_index += stop - start
    return _merge_fragments(fragments), None


def _missing_shard(shares: tuple[RankShare, ...], index: int) -> TokenShard | None:
    """Return the token shard with this index; None where tokens are not sharded."""
    if not shares or shares[0].shard.count == 1:
        return None
    return TokenShard(shares[0].shard.count, index, shares[0].shard.interleave)


def _spans(share: RankShare) -> Iterator[_Span]:
    """Yield the ranges of a share with their positions."""
    position = 0
    for held in share.units:
        yield _Span(held.start, held.stop, position, share)
        position += held.stop - held.start


def _spans_between_cuts(spans: list[_Span]) -> tuple[list[int], list[list[_Span]]]:
    """Return the cuts where any span begins or ends, and the spans that cover each range between two cuts."""
    cuts = sorted({end for span in spans for end in (span.start, span.stop)})
    covers: list[list[_Span]] = []
    active: list[_Span] = []
    waiting = sorted(spans, key=lambda span: span.start, reverse=True)
    for cut in cuts[:-1]:
        active = [span for span in active if span.stop > cut]
        while waiting and waiting[-1].start == cut:
            active.append(waiting.pop())
        covers.append(active.copy())
    return cuts, covers


def _merge_fragments(fragments: list[Fragment]) -> list[Fragment]:
    """Join fragments that continue one another on both sides."""
    last: dict[Rank, int] = {}
    joined: list[Fragment] = []
    for new in fragments:
        at = last.get(new.rank)
        if at is not None:
            old = joined[at]
            width = old.num_units
            if (new.first_unit, new.local_index, new.remote_index) == (
                old.first_unit + width,
                old.local_index + width,
                old.remote_index + width,
            ):
                joined[at] = old._replace(num_units=width + new.num_units)
                continue
        last[new.rank] = len(joined)
        joined.append(new)
    return joined
