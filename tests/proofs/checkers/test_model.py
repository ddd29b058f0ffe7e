"""The model's search finds what is broken on purpose; else it would prove nothing."""

from __future__ import annotations

from typing import Any

import pytest

from kvxferd.client.fence_slots import FenceSlots
from kvxferd.client.registration import Registration
from kvxferd.core.ranks.registry import LocalEngine
from kvxferd.core.ranks.session import Session
from kvxferd.core.sink.pull import TRANSITIONS, Pull, PullPhase, PullTrigger
from kvxferd.core.sink.pulls import Pulls
from kvxferd.core.source.announced import Announcements
from kvxferd.core.source.publish_checks import PublishChecks
from kvxferd.core.source.publishing import PublishedTransfers
from kvxferd.core.source.transfer_table import Transfer
from kvxferd.errors import Code
from kvxferd.ids import Rank
from kvxferd.wire.worker import Publish
from tests.property.model.host import Host, Job, Mover
from tests.property.model.scenario import Scenario
from tests.property.model.search import Search
from tests.property.model.sizes import restarted
from tests.property.model.states import Broken


def test_every_move_of_a_pull_is_made(monkeypatch):
    """All but one: a pull without blocks is over before it begins, and says nothing of leases."""
    made = set()
    move = Pull.transition

    def noted(pull: Pull, signal: PullTrigger) -> PullPhase:
        made.add((pull.phase, signal))
        return move(pull, signal)

    monkeypatch.setattr(Pull, "transition", noted)
    Search(Scenario(doubt=True, clocks=(0, 1))).run()
    Search(Scenario(deaths=1, drops=1, cancel=False)).run()
    Search(Scenario(grows=True)).run()
    assert TRANSITIONS.keys() - made == {(PullPhase.WAITING, PullTrigger.DELIVER)}


GROWING = {
    "and is withdrawn": Scenario(grows=True),
    "while movers die": Scenario(grows=True, deaths=1, cancel=False, deliveries=True),
    "while reads are in doubt": Scenario(
        grows=True, doubt=True, clocks=(0, 1), cancel=False, unpublish=False
    ),
    "while messages are lost": Scenario(grows=True, drops=1, cancel=False),
    "while messages are doubled": Scenario(grows=True, duplicates=1, cancel=False),
}


@pytest.mark.parametrize("scenario", GROWING.values(), ids=GROWING)
def test_a_transfer_that_grows_is_delivered_whole(scenario):
    found = Search(scenario).run()
    assert found.complete
    assert found.states > 50


# --- what is broken on purpose is found: the replaced attributes, where it shows, and by what

ready, report, tell = PublishedTransfers.rank_ready, Host._report, PublishedTransfers._notify_owners


def put_off(source: PublishedTransfers, transfer: Transfer) -> None:
    key = (transfer.engine, transfer.transfer_id)
    source._context.after(("lease", key), 64.0, lambda: put_off(source, transfer))


def ready_in_any_mapping(source: PublishedTransfers, rank: Any, name: Any, said: Any) -> Any:
    return ready(source, rank, name, said._replace(incarnation=rank.incarnation))


def silent(host: Host, mover: Mover, job: Job, **outcome: Any) -> None:
    report(host, mover, job, **(outcome | {"sent_to_worker": False}))


def tell_twice(source: PublishedTransfers, transfer: Transfer, why: Code) -> None:
    tell(source, transfer, why)
    tell(source, transfer, why)


def present(checks: PublishChecks, session: Session, engine: LocalEngine, said: Publish) -> dict[Rank, str]:
    """Not of the memory that its session knew when it was called."""
    return {rank: record.incarnation for rank, record in engine.ranks.items()}


OF_ANY_MEMORY = {"_incarnations_of": present}, r"was delivered|sleeps|was mapped anew"
BROKEN: dict[str, tuple[type, dict[str, Any], str, Scenario]] = {
    "a part is not written": (
        Transfer, {"tokens_ready": lambda self, spec: 8, "is_ready": lambda self, spec: True},
        "was delivered", Scenario(grows=True),
    ),
    "every fence word is believed": (Host, {}, "was delivered", Scenario(blind=True)),
    # Memory that sleeps comes back with other content, and what was published of it is void.
    "any memory is published, the daemon was dead": (
        PublishChecks, *OF_ANY_MEMORY, restarted(sleeps=1, crashes=(1, 0), cancel=False),
    ),
    "any memory is published while it changes": (
        PublishChecks, *OF_ANY_MEMORY, restarted(lag=True, sleeps=1, cancel=False),
    ),
    "any memory is published, the home was dead": (
        PublishChecks, *OF_ANY_MEMORY, restarted(spans=True, sleeps=1, crashes=(1, 0), cancel=False),
    ),
    "a ready outlives its memory": (
        PublishedTransfers, {"rank_ready": ready_in_any_mapping},
        r"was delivered|was ready in another mapping", restarted(ready=True, sleeps=1, cancel=False),
    ),
    # Its daemon told a rank, and died before it told the scheduler.
    "a released transfer is published again": (
        FenceSlots, {"is_overwritten": lambda *_: False},
        "was delivered", restarted(again=True, lag=True, crashes=(1, 0), cancel=False),
    ),
    "memory is suspended and mapped": (
        Registration, {"is_unmapped_elsewhere": True},
        "is suspended and mapped", restarted(sleeps=1, crashes=(1, 0), cancel=False),
    ),
    "a word is said twice": (Host, {"_report": silent}, "ended twice", Scenario(deliveries=True)),
    "a fence word is not overwritten": (
        Host, {"overwrite_fence_word": lambda *_: None}, "released before its fence word", Scenario(),
    ),
    "a lease never ends": (
        PublishedTransfers, {"_check_lease": put_off}, "kept for ever", Scenario(unpublish=False),
    ),
    "a quarantine never ends": (
        Pulls, {"mover_died": lambda pulls, mover: None}, "kept for ever", Scenario(deaths=1),
    ),
    "a release is told twice": (
        PublishedTransfers, {"_notify_owners": tell_twice}, "told twice that t1 is released", Scenario(),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("owner", "changed", "found", "scenario"), BROKEN.values(), ids=BROKEN)
def test_what_is_broken_is_found(monkeypatch, owner, changed, found, scenario):
    for name, value in changed.items():
        monkeypatch.setattr(owner, name, value)
    if "rank_ready" in changed:
        monkeypatch.setattr(Announcements, "rank_changed", lambda *_: None)
    with pytest.raises(Broken, match=found):
        Search(scenario).run()
