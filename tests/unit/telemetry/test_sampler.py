"""The timer that takes samples, on a loop whose time is virtual."""

import asyncio

from kvxferd.telemetry.sampler import Sampler
from kvxferd.telemetry.samples import Gauges, Samples
from tests.support.node_samples import pull_record
from tests.support.virtual_time import VirtualTimeLoop


async def sample_with_a_late_second(samples: Samples, loop: VirtualTimeLoop) -> None:
    num_reads = 0

    def read_gauges() -> Gauges:
        nonlocal num_reads
        num_reads += 1
        if num_reads == 1:
            raise ValueError("a gauge that cannot be read")
        return Gauges(running_pulls=num_reads)

    sampler = Sampler(samples, read_gauges, loop.time)
    sampler.start()
    await asyncio.sleep(3)
    samples.add(pull_record())
    loop.now += 2.5  # the loop does nothing meanwhile
    await asyncio.sleep(3)
    sampler.stop()
    before = num_reads
    await asyncio.sleep(3)
    assert num_reads == before


def test_a_late_loop_leaves_a_gap_and_an_error_ends_no_sampling() -> None:
    samples = Samples()
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualTimeLoop)
        runner.run(sample_with_a_late_second(samples, loop))
    columns = samples.report(900).columns
    assert columns.span_s == [None, 2, 1, None, None, 3, 1, 1, 1]
    assert columns.running_pulls == [None, 2, 3, None, None, 4, 5, 6, 7]
    assert columns.delivered == [None, 0, 0, None, None, 1, 0, 0, 0]
