"""The timer that takes samples, on a real loop."""

import asyncio
import time

from kvxferd.telemetry.sampler import Sampler
from kvxferd.telemetry.samples import Gauges, Samples
from tests.support.node_samples import pull_record


async def sampled(samples: Samples, num_seconds: int) -> None:
    async with asyncio.timeout(20):
        while len(samples.report(900).columns.at) < num_seconds:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_late_loop_leaves_a_gap_and_an_error_ends_no_sampling() -> None:
    samples = Samples()
    num_reads = 0

    def read_gauges() -> Gauges:
        nonlocal num_reads
        num_reads += 1
        if num_reads == 1:
            raise ValueError("a gauge that cannot be read")
        return Gauges(running_pulls=num_reads)

    sampler = Sampler(samples, read_gauges)
    sampler.start()
    await sampled(samples, 2)
    samples.add(pull_record())
    time.sleep(2.5)  # noqa: ASYNC251  the loop does nothing else meanwhile
    await sampled(samples, 5)
    sampler.stop()
    columns = samples.report(900).columns
    assert columns.running_pulls[0] is None
    assert columns.span_s[1] == 2
    late = [span for span in columns.span_s[2:] if span is not None and span >= 2]
    assert late
    index = columns.span_s.index(late[0], 2)
    assert columns.delivered[index] == 1
    assert columns.delivered[index - 1] is None
