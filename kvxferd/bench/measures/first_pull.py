"""The first pull between engines whose daemons have never connected, each time with new daemons."""

from __future__ import annotations

from collections.abc import Iterator

from kvxferd.bench.cases import MIB, BlockPattern, Case, blocks_for, equal_engines, layers_for, with_pool
from kvxferd.bench.contenders import KvxferdPulls, verify_all_bytes
from kvxferd.bench.figures import Finding, at_most, median
from kvxferd.bench.testbed import Site, Testbed
from kvxferd.bench.workload import FIRST_BYTES, Workload

SHAPE = "llama-3-70b"


def measure_first_pull(site: Site, workload: Workload) -> Iterator[Finding]:
    """Measure first pulls of 64 MiB; every byte is compared."""
    sized = equal_engines("sized", SHAPE, layers_for(SHAPE, FIRST_BYTES))
    blocks = blocks_for(sized, FIRST_BYTES)
    taken = []
    for number in range(workload.first_rounds):
        pair = with_pool(sized, f"first-{number}", 2 * blocks)
        with Testbed.open(site) as testbed, testbed.engines(pair) as engines:
            case = Case(pair, BlockPattern.CONTIGUOUS, blocks)
            (sample,) = verify_all_bytes(KvxferdPulls(engines, case, is_prepared=False))
        taken.append(sample.seconds)
    how = (
        f"{len(taken)} first pulls of {FIRST_BYTES // MIB} MiB, each between daemons and ranks that were "
        "just started"
    )
    yield at_most("first_pull_ms", "first pull, no earlier contact", median(taken) * 1e3, 500, how, "ms")
