"""The first pull between engines whose daemons have never met, each time with new daemons."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvxferd.cli.bench import speech
from kvxferd.cli.bench.cases import Case, Lists, blocks_for
from kvxferd.cli.bench.effort import FIRST_BYTES, Effort
from kvxferd.cli.bench.points import median
from kvxferd.cli.bench.shapes import Deployment, layers_for
from kvxferd.cli.bench.stage import Batch, Hosts, Pair, Stage

SHAPE = "llama-3-70b"


@dataclass
class First:
    """What was seen, round by round. Seconds."""

    size_bytes: int
    started_s: list[float] = field(default_factory=list)  # both daemons, from nothing to ready
    registered_s: list[float] = field(default_factory=list)  # both ranks, their processes' start included
    first_s: list[float] = field(default_factory=list)  # pull() to Delivered; the daemons have never met
    prepared_s: list[float] = field(default_factory=list)  # the first of two new engines, after prepare
    warm_s: list[float] = field(default_factory=list)  # the same pull again, prepared

    @property
    def median_s(self) -> float:
        """Of the first pulls."""
        return median(self.first_s)


async def first(hosts: Hosts, environment: Mapping[str, str], effort: Effort) -> First:
    """Measure first pulls of 64 MiB."""
    found = First(FIRST_BYTES)
    for number in range(effort.first_rounds):
        began = time.monotonic()
        async with Stage.open(hosts, environment, baselines=False) as stage:
            found.started_s.append(time.monotonic() - began)
            began = time.monotonic()
            async with stage.pair(_deployment(f"first-{number}"), baselines=False) as pair:
                found.registered_s.append(time.monotonic() - began)
                await _stamp(pair, nonce := 3 * number + 1)
                found.first_s.append(await _pulled(pair, await pair.publish(_case(pair), 1), nonce))
            async with stage.pair(_deployment(f"second-{number}"), baselines=False) as pair:
                for nonce, times in enumerate((found.prepared_s, found.warm_s), 3 * number + 2):
                    await _stamp(pair, nonce)
                    times.append(await _pulled(pair, await pair.publish_prepared(_case(pair), 1), nonce))
    return found


async def _stamp(pair: Pair, nonce: int) -> None:
    await pair.source.ask(speech.Stamp(case=_case(pair), nonce=nonce), speech.Done)


async def _pulled(pair: Pair, batch: Batch, nonce: int) -> float:
    """Pull, have every byte compared, and return what the pull took."""
    command = speech.Pull(case=_case(pair), refs=batch.refs)
    (sample,) = (await pair.sink.ask(command, speech.Moved)).samples
    await pair.release(batch)
    await pair.require_right(speech.Check(case=_case(pair), nonce=nonce, slots=1, whole=True))
    return sample.ended - sample.began


def _deployment(name: str) -> Deployment:
    layers = layers_for(SHAPE, FIRST_BYTES)
    sized = Deployment(name=name, shape=SHAPE, layers=layers, pool_blocks=1)
    blocks = blocks_for(sized, FIRST_BYTES)
    return Deployment(name=name, shape=SHAPE, layers=layers, pool_blocks=2 * blocks)


def _case(pair: Pair) -> Case:
    blocks = blocks_for(pair.deployment, FIRST_BYTES)
    return Case(deployment=pair.deployment, lists=Lists.CONTIGUOUS, blocks=blocks)
