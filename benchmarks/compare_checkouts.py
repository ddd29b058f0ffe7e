"""Small prepared pulls of several checkouts, in turn: did a change help?

    python benchmarks/compare_checkouts.py OLD NEW [NEWER ...]

Each checkout gets two daemons and a rank each for the whole run. They take turns, forwards and backwards,
with a batch of pulls each: two runs one after the other differ more than two commits do. It prints times
over all pulls, and the median of the ratios to the first checkout, batch by batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from checkout_process import CheckoutProcess

PULLS_PER_BATCH = 40  # longer than a delay by the scheduler, shorter than the load of another tenant


def pull_batches(checkout: Path, pause_s: float, fill: int) -> None:
    """Run as one checkout's process: set up, then pull a batch for each line on standard input."""
    sys.path.insert(0, str(checkout))
    import latency  # this one's, over the checkout's kvxferd

    with latency.daemon_pair(fill) as (source, measured):
        print("ready", flush=True)
        for _ in sys.stdin:
            measured.spans.clear()
            for ref in measured.prepare(PULLS_PER_BATCH):
                measured.pull(ref)
                time.sleep(pause_s)
            source.poll()
            print(json.dumps(measured.spans), flush=True)


class Checkout(CheckoutProcess):
    """A process that pulls with one checkout's code."""

    def __init__(self, stack: ExitStack, path: Path, options: argparse.Namespace) -> None:
        pulls = ["--pause", str(options.pause), "--fill", str(options.fill)]
        super().__init__(stack, Path(__file__), path, pulls)
        self.delivered_us: list[float] = []
        self.called_us: list[float] = []
        self.medians: list[float] = []

    def batch(self) -> None:
        """Have it pull a batch."""
        spans = self.measure_batch()
        delivered = [1e6 * (delivered - began) for began, _, delivered in spans]
        self.delivered_us += delivered
        self.called_us += [1e6 * (returned - began) for began, returned, _ in spans]
        self.medians.append(statistics.median(delivered))


def percentile(values: list[float], percent: int) -> float:
    """Return a percentile."""
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0.002, help="seconds between two pulls")
    parser.add_argument("--fill", type=int, default=4, help="block ids of each pull")
    parser.add_argument("--be", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be is not None:
        pull_batches(options.be, options.pause, options.fill)
        return
    if not options.checkouts:
        parser.error("name two checkouts or more")
    with ExitStack() as stack:
        checkouts = [Checkout(stack, path.resolve(), options) for path in options.checkouts]
        for checkout in checkouts:
            checkout.read_line()
        for number in range(options.rounds):
            for checkout in checkouts if number % 2 == 0 else reversed(checkouts):
                checkout.batch()
    first = checkouts[0]
    for checkout in checkouts:
        ratios = [mine / theirs for mine, theirs in zip(checkout.medians, first.medians, strict=True)]
        print(checkout.path)
        for name, times in (("delivered", checkout.delivered_us), ("inside pull()", checkout.called_us)):
            print(f"  {name:14} p50 {percentile(times, 50):6.0f}  p99 {percentile(times, 99):6.0f} us")
        less = sum(ratio < 1 for ratio in ratios)
        print(f"  {statistics.median(ratios):.2f} of the first; less in {less} of {options.rounds} batches")


if __name__ == "__main__":
    main()
