"""The bytes and runs that each prefill rank would send to each decode rank, by the sender's plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from kvxferd.explain.sample_request import sample_lists, sample_tokens, tokens_moved
from kvxferd.ids import Rank, RegionId
from kvxferd.layout import GroupKind, RankLayout
from kvxferd.plan import Plan, SendPattern
from kvxferd.plan.send_runs import pattern_runs
from kvxferd.plan.sender import sender_plans


class Send(NamedTuple):
    """What one prefill rank sends to one decode rank, for a request of 1,000 tokens."""

    decode_rank: Rank
    num_bytes: int
    num_runs: int  # for block ids without neighbours


class RankSends(NamedTuple):
    """All that one prefill rank sends."""

    rank: Rank
    to: tuple[Send, ...]  # in order of decode rank; empty if no decode rank reads it

    @property
    def num_bytes(self) -> int:
        """The bytes of a request of 1,000 tokens."""
        return sum(send.num_bytes for send in self.to)

    @property
    def num_runs(self) -> int:
        """The runs of a request of 1,000 tokens."""
        return sum(send.num_runs for send in self.to)


def engine_sends(
    prefill: Mapping[Rank, RankLayout], decode: Mapping[Rank, RankLayout], plans: Iterable[Plan]
) -> tuple[RankSends, ...]:
    """Return what every prefill rank sends, by its own plan; `plans` are those of all decode ranks."""
    consumers = {plan.local_rank: (decode[plan.local_rank], plan) for plan in plans}
    counter = _RunCounter()
    found = []
    for rank, sender in sender_plans(prefill, consumers).items():
        by_reader: dict[Rank, list[SendPattern]] = {reader: [] for reader in sender.consumers}
        for pattern in sender.patterns:
            by_reader[pattern.consumer].append(pattern)
        sends = (_send(reader, patterns, counter) for reader, patterns in by_reader.items())
        found.append(RankSends(rank, tuple(sends)))
    return tuple(found)


def _send(reader: Rank, patterns: Sequence[SendPattern], counter: _RunCounter) -> Send:
    """Sum up attention and state, each in whole bytes and whole runs, as the reads are."""
    num_bytes = num_runs = 0
    for kind in GroupKind:
        by_tokens: dict[int, list[SendPattern]] = {}
        for pattern in patterns:
            if pattern.source.kind is kind:
                tokens = tokens_moved(pattern.destination.sliding_window)
                by_tokens.setdefault(tokens, []).append(pattern)
        if by_tokens:
            sizes = {
                tokens: sum((pattern.num_bytes(tokens) for pattern in alike), Fraction())
                for tokens, alike in by_tokens.items()
            }
            runs = sum(sizes[tokens] * counter.runs_per_byte(alike) for tokens, alike in by_tokens.items())
            num_bytes += round(sum(sizes.values()))
            num_runs += max(1, round(runs))
    return Send(reader, num_bytes, num_runs)


class _RunCounter:
    """Counts the runs of patterns. Ranks at different places of equal layouts are counted once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Fraction] = {}

    def runs_per_byte(self, patterns: Sequence[SendPattern]) -> Fraction:
        """Return the runs that a byte takes on average, for block ids without neighbours."""
        key = _translation_key(patterns)
        if key not in self._known:
            self._known[key] = _count(patterns)
        return self._known[key]


def _translation_key(patterns: Sequence[SendPattern]) -> tuple[object, ...]:
    """Return what the runs depend on: all of the patterns but where the first one begins in its regions."""
    origins: dict[tuple[RegionId, RegionId], tuple[int, int]] = {}
    key: list[object] = []
    for p in patterns:
        starts = [(b.source_tensor + b.source_offset, b.destination_tensor + b.destination_offset)
                  for b in p.bases]  # fmt: skip
        regions = (p.source_strides.region, p.destination_strides.region)
        source, destination = origins.setdefault(regions, starts[0])
        key += [p.source, p.destination, p.granule_tokens, p.source_strides, p.destination_strides, p.content]
        key.append(tuple((at - source, to - destination) for at, to in starts))
    return tuple(key)


def _count(patterns: Sequence[SendPattern]) -> Fraction:
    sources, destinations = ([getattr(p, side) for p in patterns] for side in ("source", "destination"))
    tokens = sample_tokens([*sources, *destinations])
    num_runs = num_bytes = 0
    here, there = sample_lists(sources, tokens, 2), sample_lists(destinations, tokens, 2)
    for runs in pattern_runs(patterns, here, there):
        num_runs += len(runs.length)
        num_bytes += int(runs.length.sum())
    return Fraction(num_runs, max(1, num_bytes))
