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


def test_a_part_that_is_not_written_is_found(monkeypatch):
    monkeypatch.setattr(Transfer, "tokens_ready", lambda self, spec: 8)
    monkeypatch.setattr(Transfer, "is_ready", lambda self, spec: True)
    with pytest.raises(Broken, match="was delivered"):
        Search(Scenario(grows=True)).run()


def test_without_the_fence_wrong_bytes_are_delivered():
    with pytest.raises(Broken, match="was delivered"):
        Search(Scenario(blind=True)).run()


# --- memory that sleeps comes back with other content, and what was published of it is void

SLEEPS = {
    "while the daemon is dead": restarted(sleeps=1, crashes=(1, 0), cancel=False),
    "while a publish is under way": restarted(lag=True, sleeps=1, cancel=False),
    "while the home is dead": restarted(spans=True, sleeps=1, crashes=(1, 0), cancel=False),
}


@pytest.mark.parametrize("when", SLEEPS)
def test_a_publish_of_whatever_memory_is_there_is_found(monkeypatch, when):
    """Not of the memory that its session knew when it was called."""

    def present(
        checks: PublishChecks, session: Session, engine: LocalEngine, said: Publish
    ) -> dict[Rank, str]:
        return {rank: record.incarnation for rank, record in engine.ranks.items()}

    monkeypatch.setattr(PublishChecks, "_incarnations_of", present)
    with pytest.raises(Broken, match=r"was delivered|sleeps|was mapped anew"):
        Search(SLEEPS[when]).run()


def test_a_ready_that_outlives_its_memory_is_found(monkeypatch):
    ready = PublishedTransfers.rank_ready
    monkeypatch.setattr(
        PublishedTransfers,
        "rank_ready",
        lambda source, rank, name, report: ready(
            source, rank, name, report._replace(incarnation=rank.incarnation)
        ),
    )
    monkeypatch.setattr(Announcements, "rank_changed", lambda *_: None)
    with pytest.raises(Broken, match=r"was delivered|was ready in another mapping"):
        Search(restarted(ready=True, sleeps=1, cancel=False)).run()


def test_a_transfer_that_is_released_and_published_again_is_found(monkeypatch):
    """Its daemon told a rank, and died before it told the scheduler."""
    monkeypatch.setattr(FenceSlots, "is_overwritten", lambda *_: False)
    with pytest.raises(Broken, match="was delivered"):
        Search(restarted(again=True, lag=True, crashes=(1, 0), cancel=False)).run()


def test_memory_that_is_suspended_and_mapped_is_found(monkeypatch):
    monkeypatch.setattr(Registration, "is_unmapped_elsewhere", True)
    with pytest.raises(Broken, match="is suspended and mapped"):
        Search(restarted(sleeps=1, crashes=(1, 0), cancel=False)).run()


# --- what else is broken on purpose


def test_a_word_that_is_said_twice_is_found(monkeypatch):
    report = Host._report

    def silent(host: Host, mover: Mover, job: Job, **outcome: Any) -> None:
        report(host, mover, job, **(outcome | {"sent_to_worker": False}))

    monkeypatch.setattr(Host, "_report", silent)
    with pytest.raises(Broken, match="ended twice"):
        Search(Scenario(deliveries=True)).run()


def test_a_fence_word_that_is_not_overwritten_is_found(monkeypatch):
    monkeypatch.setattr(Host, "overwrite_fence_word", lambda *_: None)
    with pytest.raises(Broken, match="released before its fence word"):
        Search(Scenario()).run()


def test_a_lease_that_never_ends_is_found(monkeypatch):
    def put_off(source: PublishedTransfers, transfer: Transfer) -> None:
        key = (transfer.engine, transfer.transfer_id)
        source._context.after(("lease", key), 64.0, lambda: put_off(source, transfer))

    monkeypatch.setattr(PublishedTransfers, "_check_lease", put_off)
    with pytest.raises(Broken, match="kept for ever"):
        Search(Scenario(unpublish=False)).run()


def test_a_quarantine_that_never_ends_is_found(monkeypatch):
    monkeypatch.setattr(Pulls, "mover_died", lambda pulls, mover: None)
    with pytest.raises(Broken, match="kept for ever"):
        Search(Scenario(deaths=1)).run()


def test_a_release_that_is_told_twice_is_found(monkeypatch):
    tell = PublishedTransfers._notify_owners

    def tell_twice(source: PublishedTransfers, transfer: Transfer, why: Code) -> None:
        tell(source, transfer, why)
        tell(source, transfer, why)

    monkeypatch.setattr(PublishedTransfers, "_notify_owners", tell_twice)
    with pytest.raises(Broken, match="told twice that t1 is released"):
        Search(Scenario()).run()
