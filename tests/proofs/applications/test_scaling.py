"""The scale simulation at its smallest: it runs, it adds up, and no event costs more among more engines."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
from scaling import control_plane
from scaling.control_plane import Load, LoadResult
from scaling.engines import DeploymentShape

SINK, SOURCE = DeploymentShape(tp=2, model="qwen3-8b"), DeploymentShape(tp=2, pp=2, model="qwen3-8b")
# Of these there are many in every run. Ticks are not here: one does all that is due.
KINDS = (
    "Publish",
    "Prepare",
    "PullRequest",
    "PullDone",
    "GrantRequest",
    "GrantReply",
    "Acknowledge",
    "RequestDone",
    "RenewGrants",
)


class Calls:
    """Counts function calls: a cost that is the same on every machine and in every run."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self) -> float:
        return float(self.num)

    def __enter__(self) -> Calls:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        self.num += event in ("call", "c_call")


def calls(**load: float) -> LoadResult:
    with Calls() as meter:
        return control_plane.measure(Load(seconds=8.0, local=SINK, remote=SOURCE, **load), meter)


@pytest.mark.parametrize(
    ("name", "few", "many"),
    [
        ("num_engines", 2, 24),
        ("transfers_per_rank", 5.0, 40.0),
        ("num_waiting", 4, 200),
    ],
)
def test_no_event_costs_more_among_many(name: str, few: float, many: float) -> None:
    usual = {"num_engines": 2, "transfers_per_rank": 10.0, "num_waiting": 0}
    at_few, at_many = calls(**usual | {name: few}), calls(**usual | {name: many})
    assert at_few.num_grants_held > 0
    assert at_few.num_delivered > 0
    for kind in KINDS:
        # What is shared out by chance (timers are thrown out when their time comes, a peer of whom no
        # grant is held is renewed no more) is less than the same again; growth would be eightfold.
        assert at_many.us_per_event[kind] < 2 * at_few.us_per_event[kind], kind
    # A tick may do all that is due: more often or more at a time, and all ticks together as much more.
    assert ticks(at_many) < 2 * max(many, 1.0) / max(few, 1.0) * ticks(at_few)
    # Nor does it cost more to meet an engine where many are known.
    assert at_many.learn_ms < 2 * at_few.learn_ms


def ticks(measured: LoadResult) -> float:
    """What all ticks of a run cost."""
    return measured.us_per_event["Tick"] * measured.num_events["Tick"]
