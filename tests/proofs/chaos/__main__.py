"""`make chaos FAULTS=N SEED=S`: ends with one line of JSON; exits 1 where a promise was broken."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.proofs.chaos.epoch import READS, SHAPES, TRANSPORTS, Epoch
from tests.proofs.chaos.tally import Tally

EPOCH_FAULTS = 30  # then everything is taken down, and another cluster started


def chaos(
    seed: int,
    num_faults: int,
    directory: Path,
    sabotage: str = "",
    only: str = "",
    verbose: bool = False,
    read: str = "",
) -> Tally:
    """Run; the tally says how it went. `only`: what the names of the faults must contain.

    `read`: how all movers read; else one cluster after another in one of the ways.
    """
    rng = random.Random(seed)
    tally = Tally()
    number = 0
    while tally.faults.total() < num_faults:
        shape = SHAPES[(number + seed) % len(SHAPES)]
        turn = (number + seed) // len(SHAPES)  # else a shape would see one transport only
        transport = list(TRANSPORTS)[(number + seed + turn) % len(TRANSPORTS)]
        way = read or READS[(number + seed) % len(READS)]
        epoch = Epoch(directory / str(number), rng, tally, shape, transport, way, sabotage, only)
        try:
            epoch.run(min(EPOCH_FAULTS, num_faults - tally.faults.total()))
        finally:
            epoch.close()
        number += 1
        if verbose:
            now = f"{tally.faults.total()} faults, {transport}, {way} reads, {shape}"
            print(f"{now}: {tally.line(seed)}", file=sys.stderr)
    return tally


def main() -> int:
    arguments = argparse.ArgumentParser(prog="chaos", description=__doc__)
    arguments.add_argument("--faults", type=int, default=100)
    arguments.add_argument("--seed", type=int, default=None, help="chosen and printed where none is given")
    arguments.add_argument(
        "--sabotage", default="",
        choices=("", "corrupt", "late-write", "hang", "leak", "unwritten"),
        help="break a promise, to show that it is noticed",
    )  # fmt: skip
    arguments.add_argument(
        "--only", default="", help="only faults whose name contains this: kill, freeze, link"
    )
    arguments.add_argument("--read", choices=("", *READS), default="", help="how all movers read")
    arguments.add_argument("--keep", type=Path, help="where logs are kept; else they are removed at the end")
    given = arguments.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}", file=sys.stderr, flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvxferd-chaos-") as made:
        directory = given.keep or Path(made)
        tally = chaos(
            seed, given.faults, directory, given.sabotage, given.only, verbose=True, read=given.read
        )
    print(tally.line(seed, elapsed_s=round(time.monotonic() - began, 1)))
    return 0 if tally.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
