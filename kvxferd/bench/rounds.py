"""Rounds: every contender in turn, each time in another order, and each time checked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvxferd.bench import protocol
from kvxferd.bench.cases import Case
from kvxferd.bench.implementations import Implementation
from kvxferd.bench.protocol import Sample
from kvxferd.bench.testbed import EnginePair
from kvxferd.errors import KvxferdError

_nonces = itertools.count(1)


@dataclass
class Round:
    """What one contender did in one round."""

    samples: list[Sample]
    window: int

    @property
    def num_bytes(self) -> int:
        """Bytes moved."""
        return sum(sample.bytes for sample in self.samples)

    @property
    def seconds(self) -> float:
        """Time that the requests took: their sum, or where several ran at once from first to last."""
        # Where a baseline builds its request that is not counted against it: only post to done.
        if self.window == 1:
            return sum(sample.ended - start_of(sample) for sample in self.samples)
        return max(s.ended for s in self.samples) - min(start_of(s) for s in self.samples)


@dataclass
class Rounds:
    """One case, all contenders."""

    case: Case
    window: int
    by_implementation: dict[str, list[Round]] = field(default_factory=dict)


def start_of(sample: Sample) -> float:
    """Return when a request begins to count."""
    return sample.built


async def interleave(
    pair: EnginePair,
    case: Case,
    contenders: Sequence[Implementation],
    rounds: int,
    count: int,
    window: int = 1,
) -> Rounds:
    """Move a case `count` requests a round by each contender in turn.

    Before that each has moved it once: onto wiped memory, and every byte was compared. In each
    round the ends of all runs are compared. Raises KvxferdError where a byte is wrong.
    """
    found = Rounds(case, window, {contender.name: [] for contender in contenders})
    await verify_all_bytes(pair, case, contenders, window)
    for number in range(rounds):
        for contender in order_in_round(contenders, number):
            nonce = next(_nonces)
            await pair.source.request(protocol.Stamp(case=case, nonce=nonce), protocol.Done)
            samples = await contender.move(case, count, window)
            found.by_implementation[contender.name].append(Round(samples, window))
            if contender.is_verifiable:
                check = protocol.Check(case=case, nonce=nonce, slots=min(count, case.slots))
                await _check(pair, contender, check)
    return found


def order_in_round(contenders: Sequence[Implementation], number: int) -> list[Implementation]:
    """Return whose turn it is in a round: each is first in its time, and follows no one in all rounds."""
    turn = number % len(contenders)
    order = [*contenders[turn:], *contenders[:turn]]
    # Only turned, the same one would always go before: with its caches, and its movers still polling.
    return order if number % 2 == 0 else order[::-1]


async def verify_all_bytes(
    pair: EnginePair, case: Case, contenders: Sequence[Implementation], window: int
) -> None:
    """Have each contender move every slot onto wiped memory, and compare every byte."""
    amounts: dict[str, int] = {}
    for contender in contenders:
        nonce = next(_nonces)
        await pair.source.request(protocol.Stamp(case=case, nonce=nonce), protocol.Done)
        await pair.sink.request(protocol.Wipe(case=case), protocol.Done)
        samples = await contender.move(case, case.slots, window)
        amounts[contender.name] = sum(sample.bytes for sample in samples)
        if contender.is_verifiable:
            check = protocol.Check(case=case, nonce=nonce, slots=case.slots, whole=True)
            await _check(pair, contender, check)
    if len(set(amounts.values())) > 1:
        raise KvxferdError(f"cannot compare: bytes moved differ: {amounts}")


async def _check(pair: EnginePair, contender: Implementation, check: protocol.Check) -> None:
    try:
        await pair.require_correct(check)
    except KvxferdError as error:
        raise KvxferdError(f"{error.message}; moved by {contender.name}", error.code) from error
