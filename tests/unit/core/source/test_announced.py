"""What ranks report before the publish: whose memory it is of, how long it counts, what looks at it."""

from __future__ import annotations

import pytest

from kvxferd.core.source.announced import Announcements, Report
from kvxferd.core.source.transfer_table import ALL_TOKENS
from kvxferd.ids import BootId, EngineId, EngineKey, Generation, Incarnation, Rank, TransferId
from kvxferd.wire.worker import Ready
from tests.support.simulation import World

RANK, MAPPING = Rank(0, 0), Incarnation("first")
ALL = Report(MAPPING, ALL_TOKENS)
KEY = EngineKey(EngineId("one"), Generation("g")), TransferId("t1")


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def announced(world: World) -> Announcements:
    return world.host("p").node.published.announced


def test_a_change_of_a_rank_looks_at_its_own_engine(
    announced: Announcements, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unread(dict[Rank, Report]):
        def __contains__(self, rank: object) -> bool:
            raise AssertionError("another engine's report is looked at")

    announced.add(KEY, RANK, ALL, 0)
    one = announced._find(KEY)
    assert one is not None
    one.reports = Unread(one.reports)
    announced.rank_changed(EngineKey(EngineId("other"), Generation("g")), RANK)
    assert list(announced) == [KEY]


def test_what_a_rank_said_early_goes_with_its_process(world: World) -> None:
    worker = world.engine(world.host("p"), "prefill")[0]
    worker.say(Ready(transfer_id=TransferId("t1"), incarnation=Incarnation(worker.incarnation)))
    announced = worker.host.node.published.announced
    key = (worker.spec.key, TransferId("t1"))
    assert dict(announced.take(key)) == {RANK: Report(Incarnation(worker.incarnation), ALL_TOKENS)}
    worker.say(Ready(transfer_id=TransferId("t1"), incarnation=Incarnation(worker.incarnation)))
    worker.close()
    successor = world.connect(worker.host)
    successor.spec, successor.layout, successor.memory = worker.spec, worker.layout, worker.memory
    world.register_again(successor, "second")
    assert not announced.take(key)


def test_of_one_mapping_the_furthest_report_counts_and_another_mapping_replaces_it(
    announced: Announcements,
) -> None:
    for num_tokens in (8, 16, 12):
        announced.add(KEY, RANK, Report(MAPPING, num_tokens), 0)
    assert announced.take(KEY)[RANK].num_tokens == 16
    other = Report(Incarnation("second"), 4)
    for report in (ALL, other):
        announced.add(KEY, RANK, report, 0)
    assert announced.take(KEY)[RANK] == other
    assert not announced.take(KEY)
    assert not list(announced)


def test_a_publish_takes_no_early_ready_of_other_memory_than_its_own(world: World) -> None:
    first, second = world.engine(world.host("p"), "prefill", tp=2)
    node = first.host.node
    key = (first.spec.key, TransferId("t1"))
    node.published.announced.add(key, Rank(0, 1), Report(Incarnation("another"), ALL_TOKENS), 0)
    first.publish("t1", [1], 4)
    (transfer,) = node.published.table.live.values()
    assert transfer.unready(first.spec) == [Rank(0, 1)]
    second.ready("t1")
    assert transfer.unready(first.spec) == []


def test_a_report_that_is_repeated_after_its_time_is_late_until_nobody_repeats_it(
    world: World, announced: Announcements
) -> None:
    """One of the same rank that is new counts, and another rank's is its own."""
    request = (BootId("member"), 7)
    world.advance(1)
    announced.add(KEY, RANK, ALL._replace(request=request), "member")
    world.advance(world.settings.lease_s - 1)
    assert not announced.is_late(KEY, ALL._replace(request=request))
    world.advance(1)
    assert not announced.take(KEY)
    assert announced.is_late(KEY, ALL._replace(request=request))
    assert not announced.is_late(KEY, ALL._replace(request=(BootId("member"), 8)))
    announced.add(KEY, RANK, ALL._replace(request=(BootId("member"), 8)), "member")
    assert list(announced.take(KEY)) == [RANK]
    assert announced.is_late(KEY, ALL._replace(request=request))
    world.advance(2 * world.settings.acknowledge_for_s)
    assert not list(announced)


def test_a_report_that_is_replaced_counts_no_more_when_it_is_repeated(announced: Announcements) -> None:
    boot = BootId("member")
    first, further, equal = (
        Report(MAPPING, num_tokens, (boot, number)) for number, num_tokens in ((1, 8), (2, 16), (3, 16))
    )
    for report in (first, further, equal):
        announced.add(KEY, RANK, report, 0)
    assert [announced.is_late(KEY, report) for report in (first, further, equal)] == [True, False, True]
