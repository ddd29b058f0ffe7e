"""Whether each placement of GPU memory works, and how fast, each with its own daemon."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import msgspec

from kvxferd.doctor.finding import CheckContext, Finding, Verdict
from kvxferd.tooling.isolated_process import run_isolated
from kvxferd.tooling.work_directory import make_work_directory

TRIAL_TIMEOUT_S = 120.0  # a daemon, its first GPU context and some pulls
DEVICE_COPY = "device copy"
PLACEMENTS = ("direct", "resident", "staged")


class PlacementResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one placement."""

    placement: str
    refusal: str = ""  # "" where it works
    gigabytes_per_s: float = 0.0
    lanes: str = ""


def try_placements(node: CheckContext, gpus: Sequence[Finding]) -> tuple[PlacementResult, ...]:
    """Try each on the first GPU, in processes that may crash or hang. Return () if there is no GPU."""
    devices = [gpu.facts["uuid"] for gpu in gpus if gpu.verdict is not Verdict.FAIL and "uuid" in gpu.facts]
    if not devices:
        return ()
    return tuple(_try_placement(node, placement, devices[0]) for placement in (DEVICE_COPY, *PLACEMENTS))


def _try_placement(node: CheckContext, placement: str, device: str) -> PlacementResult:
    directory = make_work_directory("kvxferd-doctor-")
    try:
        flags = [placement, device, str(directory)]
        outcome = run_isolated("kvxferd.doctor.placement_trial", flags, node.environment, TRIAL_TIMEOUT_S)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if outcome.value is None:
        return PlacementResult(placement=placement, refusal=outcome.failure)
    return PlacementResult(placement=placement, **outcome.value)
