"""Whether each placement of GPU memory works, and how fast, each with its own daemon."""

from __future__ import annotations

from collections.abc import Sequence

from kvxferd.doctor.finding import CheckContext, Finding, Verdict
from kvxferd.doctor.isolated import call_isolated, isolated
from kvxferd.doctor.placement_trial import DEVICE_COPY, PLACEMENTS, PlacementResult, try_placement
from kvxferd.errors import KvxferdError

TRIAL_TIMEOUT_S = 120.0  # a daemon, its first GPU context and some pulls


def try_placements(node: CheckContext, gpus: Sequence[Finding]) -> tuple[PlacementResult, ...]:
    """Try each on the first GPU, in processes that may crash or hang. Return () if there is no GPU."""
    devices = [gpu.facts["uuid"] for gpu in gpus if gpu.verdict is not Verdict.FAIL and "uuid" in gpu.facts]
    if not devices:
        return ()
    return tuple(_try_placement(node, placement, devices[0]) for placement in (DEVICE_COPY, *PLACEMENTS))


def _try_placement(node: CheckContext, placement: str, device: str) -> PlacementResult:
    try:
        with isolated(object, node.environment) as child:
            where = child.log.parent
            return call_isolated(child, TRIAL_TIMEOUT_S, try_placement, placement, device, where)
    except KvxferdError as error:
        return PlacementResult(placement=placement, refusal=error.message)
