"""Every placement of GPU memory, each through a daemon of its own: does it work, and how fast?"""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import msgspec

from kvxferd.cli.doctor.apart import run_apart
from kvxferd.cli.doctor.finding import Finding, Node, Verdict
from kvxferd.cli.running import make_directory

LIMIT_S = 120.0  # a daemon, its first GPU context and some pulls
COPY = "device copy"
PLACEMENTS = ("direct", "resident", "staged")


class Tried(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of one placement."""

    placement: str
    refusal: str = ""  # "" where it works
    gigabytes_per_s: float = 0.0
    lanes: str = ""


def try_placements(node: Node, gpus: Sequence[Finding]) -> tuple[Tried, ...]:
    """Try each on the first GPU, in processes that may crash or hang. Nothing where there is no GPU."""
    devices = [gpu.facts["uuid"] for gpu in gpus if gpu.verdict is not Verdict.NO and "uuid" in gpu.facts]
    if not devices:
        return ()
    return tuple(_try(node, placement, devices[0]) for placement in (COPY, *PLACEMENTS))


def _try(node: Node, placement: str, device: str) -> Tried:
    directory = make_directory("kvxferd-doctor-")
    try:
        flags = [placement, device, str(directory)]
        outcome = run_apart("kvxferd.cli.doctor.placing", flags, node.environment, LIMIT_S)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if outcome.value is None:
        return Tried(placement=placement, refusal=outcome.refusal)
    return Tried(placement=placement, **outcome.value)
