"""Pulls between layouts that differ, with `mover.read` auto and direct, and between equal ones, in turn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec

from kvxferd.bench.cases import BLOCKS_PER_RUN, BlockPattern, Case
from kvxferd.bench.points import median
from kvxferd.bench.processes import BenchProcesses
from kvxferd.bench.rank_process import BenchRank
from kvxferd.bench.shapes import BenchDeployment, EngineOptions, footprint
from kvxferd.bench.testbed import RunningEngines, Testbed
from kvxferd.bench.workload import MIB, CrossingSize
from kvxferd.errors import KvxferdError
from kvxferd.records import PullRecord
from kvxferd.telemetry.history import record_from_json

SHAPE = "qwen3-8b"  # eight heads of 128, so that a head of a token is 256 bytes
LAYERS = 4  # 16 KiB a token, so that also a small request has many blocks
WAY_VARIABLE = "KVXFERD_MOVER_READ"
AUTO, DIRECT, EQUAL = "auto", "direct", "equal"
# More bytes are compared where they are first moved, and no more in each round.
_MAX_CHECKED_BYTES = 256 * MIB


class Crossing(msgspec.Struct, frozen=True):
    """Two engines whose layouts differ."""

    source: EngineOptions
    sink: EngineOptions
    has_short_runs: bool = True

    def __str__(self) -> str:
        return f"{self.source} to {self.sink}"


CROSSINGS = (
    Crossing(EngineOptions("HND", 16, tp=4), EngineOptions("NHD", 32, tp=2)),
    Crossing(EngineOptions("NHD", 32, tp=4), EngineOptions("HND", 16, tp=2)),
    Crossing(EngineOptions("HND", 16), EngineOptions("HND", 32)),
    Crossing(EngineOptions("HND", 12), EngineOptions("HND", 16)),
    Crossing(EngineOptions("HND", 16, tp=4), EngineOptions("HND", 16, tp=2)),
    Crossing(EngineOptions("NHD", 16), EngineOptions("NHD", 16, tp=4)),
    Crossing(EngineOptions("HND", 16, pp=2), EngineOptions("HND", 16), has_short_runs=False),
)


def crossings_of(layouts: tuple[str, ...]) -> tuple[Crossing, ...]:
    """Return what is crossed: for several layouts, each between engines of TP 4 and 2."""
    if len(layouts) == 1:
        return CROSSINGS
    return tuple(Crossing(EngineOptions(name, 16, tp=4), EngineOptions(name, 16, tp=2)) for name in layouts)


class CrossingPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One pair of layouts and one size. Times are medians of the rounds, of all ranks' pulls together."""

    transport: str
    crossing: str
    lists: str
    size_bytes: int  # as requested
    bytes: int  # of one request, as moved
    rounds: int
    runs: int  # that a direct request has
    is_counted: bool  # whether the ratios of the summary count it
    auto_s: float
    direct_s: float
    equal_s: float
    auto_covered_bytes: int  # of all rounds: not read directly by auto
    # Medians over rounds: above 1, auto was faster.
    auto_to_direct: float
    auto_to_equal: float


@dataclass
class _Contender:
    """One way to move a case: engines, and what their pulls took."""

    name: str
    pair: RunningEngines
    seconds: list[float] = field(default_factory=list)
    bytes: int = 0
    runs: int = 0


def measure_crossing(
    processes: BenchProcesses,
    transport: str,
    environment: Mapping[str, str],
    sizes: Sequence[CrossingSize],
    crossings: Sequence[Crossing],
) -> Iterator[CrossingPoint]:
    """Yield a point for each pair of layouts and each size."""
    together = [one for one in sizes if one.size_bytes <= _MAX_CHECKED_BYTES]
    alone = [[one] for one in sizes if one.size_bytes > _MAX_CHECKED_BYTES]
    with ExitStack() as stack:
        testbeds = {
            way: stack.enter_context(
                Testbed.open(processes, environment, baselines=False, sink_settings={WAY_VARIABLE: way})
            )
            for way in (AUTO, DIRECT)
        }
        for number, crossing in enumerate(crossings):
            for some in ([together] if together else []) + alone:
                name = f"{transport}-{number}-{some[-1].size_bytes // MIB}"
                yield from _measure_pairs(testbeds, transport, crossing, name, some)


def _measure_pairs(
    testbeds: Mapping[str, Testbed], transport: str, crossing: Crossing, name: str, sizes: list[CrossingSize]
) -> Iterator[CrossingPoint]:
    """Start the engines of one pair of layouts, and yield a point for each size."""
    tokens = max(request_tokens(crossing, one.size_bytes) for one in sizes)
    equal = Crossing(crossing.sink, crossing.sink)
    deployments = {
        AUTO: deployment_of(f"{name}-auto", crossing, tokens),
        DIRECT: deployment_of(f"{name}-direct", crossing, tokens),
        EQUAL: deployment_of(f"{name}-equal", equal, tokens),
    }
    with ExitStack() as stack:
        pairs = {
            way: stack.enter_context(
                testbeds[DIRECT if way == DIRECT else AUTO].pair(deployment, baselines=False)
            )
            for way, deployment in deployments.items()
        }
        for one in sizes:
            yield _measure_point(pairs, transport, crossing, one)


def deployment_of(name: str, crossing: Crossing, num_tokens: int) -> BenchDeployment:
    """Return engines with room for requests of so many tokens, and half as much beside them."""
    source, sink = crossing.source, crossing.sink
    whole = math.lcm(source.block_tokens, sink.block_tokens)
    room = -(-num_tokens * 3 // (2 * whole)) * whole
    return BenchDeployment(
        name=name,
        shape=SHAPE,
        layers=LAYERS,
        pool_blocks=room // source.block_tokens,
        source=source,
        sink=sink,
    )


def memory_bytes(size: CrossingSize) -> int:
    """Return the memory of three pairs of engines, both sides, with room for half as much again."""
    return size.size_bytes * 3 * 2 * 3 // 2


def request_tokens(crossing: Crossing, size_bytes: int) -> int:
    """Return the tokens of a request of about this size, in whole runs of four blocks on both sides."""
    alone = BenchDeployment(name="alone", shape=SHAPE, layers=LAYERS, pool_blocks=1)
    of = footprint(alone.layout())
    whole = BLOCKS_PER_RUN * math.lcm(crossing.source.block_tokens, crossing.sink.block_tokens)
    return max(1, round(size_bytes * of.block_tokens / of.block_bytes / whole)) * whole


def _measure_point(
    pairs: Mapping[str, RunningEngines], transport: str, crossing: Crossing, size: CrossingSize
) -> CrossingPoint:
    contenders = [_Contender(name, pair) for name, pair in pairs.items()]
    tokens = request_tokens(crossing, size.size_bytes)
    is_checked = size.size_bytes <= _MAX_CHECKED_BYTES
    for nonce, one in enumerate(contenders, 1):  # every connection is made, every table is there
        _move(one, tokens, nonce, is_checked=True, is_whole=is_checked)
        one.seconds.clear()
    covered = _covered_bytes(pairs[AUTO])
    for number in range(size.rounds):
        # Auto and direct change places, as they are compared most closely.
        order = contenders if number % 2 == 0 else contenders[::-1]
        for one in order:
            _move(one, tokens, number + 10, is_checked=is_checked)
    auto, direct, equal = contenders
    if len({auto.bytes, direct.bytes, equal.bytes}) > 1:
        raise KvxferdError(f"cannot compare: bytes moved differ: {auto.bytes, direct.bytes, equal.bytes}")
    return CrossingPoint(
        transport=transport,
        crossing=str(crossing),
        lists=BlockPattern.FRAGMENTED.value,
        size_bytes=size.size_bytes,
        bytes=auto.bytes,
        rounds=size.rounds,
        runs=direct.runs,
        is_counted=crossing.has_short_runs,
        auto_s=median(auto.seconds),
        direct_s=median(direct.seconds),
        equal_s=median(equal.seconds),
        auto_covered_bytes=max(0, _covered_bytes(pairs[AUTO]) - covered),
        auto_to_direct=median([d / a for d, a in zip(direct.seconds, auto.seconds, strict=True)]),
        auto_to_equal=median([e / a for e, a in zip(equal.seconds, auto.seconds, strict=True)]),
    )


def _move(one: _Contender, num_tokens: int, nonce: int, is_checked: bool, is_whole: bool = False) -> None:
    """Publish, prepare, and have one rank after the other pull."""
    pair = one.pair
    assert pair.deployment.source is not None
    blocks = num_tokens // pair.deployment.source.block_tokens
    case = Case(deployment=pair.deployment, lists=BlockPattern.FRAGMENTED, blocks=blocks)
    if is_checked:
        pair.call_all("source", BenchRank.stamp, case, nonce)
    if is_whole:
        pair.call_all("sink", BenchRank.wipe, case)
    batch = pair.publish_prepared(case, 1)
    samples = []
    for rank in pair.ranks:
        samples += pair.workers["sink", rank].call(BenchRank.pull_all, case, batch.refs)
    pair.release(batch)
    if is_checked:
        pair.require_correct(case, nonce, 1, is_whole)
    one.seconds.append(sum(sample.ended - sample.began for sample in samples))
    one.bytes = sum(sample.bytes for sample in samples)
    one.runs = sum(sample.runs for sample in samples)


def _covered_bytes(pair: RunningEngines) -> int:
    """Return how many bytes of this pair's pulls in the sink's history were not read directly."""
    reply = pair.testbed.daemons["sink"].control.get("/v1/history")
    records = [record_from_json(one) for one in reply["records"]]
    return sum(
        num_bytes
        for record in records
        if isinstance(record, PullRecord) and record.source.startswith(f"{pair.deployment.name}-")
        for way, num_bytes in record.ways.items()
        if way != "direct"
    )
