"""Small prepared pulls: the time that a daemon adds to raw NIXL, and the time of the call itself."""

from __future__ import annotations

from collections.abc import Iterator

from kvxferd.bench.cases import (
    IDS_SHAPE,
    BlockPattern,
    Case,
    blocks_for,
    equal_engines,
    ids_per_pull,
    layers_for,
    with_pool,
)
from kvxferd.bench.contenders import KVXFERD, RAW, KvxferdPulls, Rounds, contenders_of, interleave
from kvxferd.bench.figures import Finding, at_most, median, percentile
from kvxferd.bench.measures.throughput import kvxferd_point
from kvxferd.bench.testbed import Site, Testbed
from kvxferd.bench.workload import SMALL_BYTES, Workload

SHAPE = "llama-3-70b"
NUM_SLOTS = 4
# Block ids of a call, and its figure. The most are a million tokens at 16 tokens a block.
CALLS = (
    (65_536, "pull_call_us_p99", "time inside pull(), 65,536 block ids, p99"),
    (1024, "pull_call_few_us_p99", "the same of 1,024"),
    (1, "pull_call_one_us_p99", "the same of one"),
)


def measure_latency(site: Site, workload: Workload) -> Iterator[Finding]:
    """Measure pulls of 64 KiB, one after the other."""
    sized = equal_engines("sized", SHAPE, layers_for(SHAPE, SMALL_BYTES))
    blocks = blocks_for(sized, SMALL_BYTES)
    pair = with_pool(sized, "small", 2 * NUM_SLOTS * ids_per_pull(sized, blocks))
    with Testbed.open(site, has_baselines=True) as testbed, testbed.engines(pair) as engines:
        case = Case(pair, BlockPattern.FRAGMENTED, blocks, NUM_SLOTS)
        found = interleave(contenders_of(engines, case), workload.rounds, workload.small_per_round)
    point = kvxferd_point("latency", site.transport, SHAPE, SMALL_BYTES, case, found)
    yield point
    added = added_latency(found)
    how = (
        f"{len(added)} pulls of 64 KiB in {point.rounds} rounds, prepared, one at a time, less raw NIXL's "
        f"median from post to done in the same round; interleaved with {', '.join(point.ratios)}"
    )
    for percent, aim in ((50, 300), (99, 1000)):
        name, title = f"added_latency_us_p{percent}", f"added latency, 64 KiB, p{percent}"
        yield at_most(name, title, percentile(added, percent) * 1e6, aim, how, "us")


def added_latency(found: Rounds) -> list[float]:
    """Return, for each pull, its time less the median that raw NIXL took in the same round, in seconds."""
    result = []
    for ours, theirs in zip(found[KVXFERD], found[RAW], strict=True):
        typical = median([sample.seconds for sample in theirs.samples])
        result += [sample.seconds - typical for sample in ours.samples]
    return result


def measure_calls(site: Site, workload: Workload) -> Iterator[Finding]:
    """Measure calls whose ids are an int32 buffer, which the client copies."""
    pair = equal_engines("ids", IDS_SHAPE, 1, max(num for num, _, _ in CALLS))
    count, rounds = workload.calls_per_round, workload.rounds
    how = f"{rounds * count} calls each in {rounds} rounds, int32 buffer, which the client copies"
    with Testbed.open(site) as testbed, testbed.engines(pair) as engines:
        for num, name, title in CALLS:
            ours = KvxferdPulls(engines, Case(pair, BlockPattern.CONTIGUOUS, num), is_prepared=False)
            _, *taken = interleave([ours], rounds + 1, count)[KVXFERD]  # the first round is a warm-up
            times = [sample.posted - sample.began for one in taken for sample in one.samples]
            yield at_most(name, title, percentile(times, 99) * 1e6, 100, how, "us")
