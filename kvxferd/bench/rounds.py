"""Rounds: every implementation takes its turn, each round in another order, and each time checked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvxferd.bench.cases import Case
from kvxferd.bench.implementations import Implementation
from kvxferd.bench.rank_process import BenchRank
from kvxferd.bench.samples import Sample
from kvxferd.bench.testbed import RunningEngines
from kvxferd.errors import KvxferdError

_nonces = itertools.count(1)


@dataclass
class Round:
    """The result of one implementation in one round."""

    samples: list[Sample]
    window: int

    @property
    def num_bytes(self) -> int:
        """The bytes that were moved."""
        return sum(sample.bytes for sample in self.samples)

    @property
    def seconds(self) -> float:
        """The time of the requests: their sum, or from first to last if several ran at once."""
        # The time in which a baseline builds its request does not count against it: only post to done.
        if self.window == 1:
            return sum(sample.ended - start_of(sample) for sample in self.samples)
        return max(s.ended for s in self.samples) - min(start_of(s) for s in self.samples)


@dataclass
class Rounds:
    """One case, moved by all implementations."""

    case: Case
    window: int
    by_implementation: dict[str, list[Round]] = field(default_factory=dict)


def start_of(sample: Sample) -> float:
    """Return when the timed part of a request begins."""
    return sample.built


def interleave(
    pair: RunningEngines,
    case: Case,
    implementations: Sequence[Implementation],
    rounds: int,
    count: int,
    window: int = 1,
) -> Rounds:
    """Move `count` requests of a case a round by each implementation in turn.

    Before that each implementation moves all slots once onto wiped memory, and every byte is compared.
    In each round the ends of all runs are compared. Raises KvxferdError if a byte is wrong.
    """
    found = Rounds(case, window, {implementation.name: [] for implementation in implementations})
    verify_all_bytes(pair, case, implementations, window)
    for number in range(rounds):
        for implementation in order_in_round(implementations, number):
            nonce = next(_nonces)
            pair.source.call(BenchRank.stamp, case, nonce)
            samples = implementation.move(case, count, window)
            found.by_implementation[implementation.name].append(Round(samples, window))
            _check(pair, implementation, case, nonce, min(count, case.slots))
    return found


def order_in_round(implementations: Sequence[Implementation], number: int) -> list[Implementation]:
    """Return the order of a round: each is first in some round, and none always follows another."""
    turn = number % len(implementations)
    order = [*implementations[turn:], *implementations[:turn]]
    # With a mere rotation the same one would always go before, with its caches and its movers still polling.
    return order if number % 2 == 0 else order[::-1]


def verify_all_bytes(
    pair: RunningEngines, case: Case, implementations: Sequence[Implementation], window: int
) -> None:
    """Have each implementation move every slot onto wiped memory, and compare every byte."""
    amounts: dict[str, int] = {}
    for implementation in implementations:
        nonce = next(_nonces)
        pair.source.call(BenchRank.stamp, case, nonce)
        pair.sink.call(BenchRank.wipe, case)
        samples = implementation.move(case, case.slots, window)
        amounts[implementation.name] = sum(sample.bytes for sample in samples)
        _check(pair, implementation, case, nonce, case.slots, is_whole=True)
    if len(set(amounts.values())) > 1:
        raise KvxferdError(f"cannot compare: bytes moved differ: {amounts}")


def _check(
    pair: RunningEngines,
    implementation: Implementation,
    case: Case,
    nonce: int,
    slots: int,
    is_whole: bool = False,
) -> None:
    try:
        pair.require_correct(case, nonce, slots, is_whole)
    except KvxferdError as error:
        raise KvxferdError(f"{error.message}; moved by {implementation.name}", error.code) from error
