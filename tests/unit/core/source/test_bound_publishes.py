"""A publish is bound to the memory that its session knew when it was called, whatever happened since."""

from __future__ import annotations

import msgspec
import pytest

from kvxferd.core import events as ev
from kvxferd.core.source.announced import Announcements, Report
from kvxferd.core.source.publishing import PublishedTransfers
from kvxferd.core.source.transfer_table import ALL_TOKENS
from kvxferd.errors import Code
from kvxferd.ids import (
    BootId,
    EngineId,
    EngineKey,
    Generation,
    GroupName,
    Incarnation,
    Rank,
    SessionId,
    TransferId,
)
from kvxferd.layout import GroupKind, PackedBlocks, pack_ids
from kvxferd.layout.presets import attention_layout
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import PEER_MESSAGES
from kvxferd.wire.common import TransferRef
from kvxferd.wire.peer import RankReady
from tests.support.simulation import IDS, SINK_IDS, TOKENS, Host, Worker, World, mover_of, spec_of

FIRST, SECOND = Rank(0, 0), Rank(0, 1)


def replay(world: World, worker: Worker, ref: TransferRef, incarnations: tuple) -> bytes:
    """Publish again what an earlier daemon had, as a client does; return the fence word."""
    word = world.rng.randbytes(16)
    worker.fence[:16] = word
    publish = wk.Publish(
        transfer_id=ref.transfer_id,
        nonce=ref.nonce,
        blocks={"full": PackedBlocks(pack_ids(IDS))},
        num_tokens=TOKENS,
        fence_slot=0,
        incarnations=incarnations,
    )
    worker.say(publish, word)
    return word


def suspend(worker: Worker) -> None:
    worker.say(wk.Suspend())
    assert worker.received(wk.Suspended)


def failure(world: World, sink: Worker, ref: TransferRef) -> Code:
    ticket = sink.pull(ref, SINK_IDS, TOKENS, deadline_s=60.0)
    world.advance(61.0)
    failed = sink.ended(ticket)
    assert isinstance(failed, wk.TicketFailed), failed
    return failed.code


@pytest.mark.parametrize("first_back", ["scheduler", "rank"])
def test_a_rank_that_slept_while_its_daemon_was_away(world, sink, first_back):
    spec = spec_of("prefill", tp=2, publish_implies_ready=True)
    host = world.host("p")
    world.engine(host, "prefill", tp=2, publish_implies_ready=True)
    scheduler = world.attach(host, spec)
    known = scheduler.known
    assert set(known) == {(FIRST, "first"), (SECOND, "first")}
    ref = scheduler.publish("t1", IDS, TOKENS)

    host = world.host("p")  # another daemon on the same endpoint; one rank has slept meanwhile
    ranks = [world.connect(host) for _ in range(2)]
    scheduler = world.attach(host, spec)

    def come_back(number: int, incarnation: str) -> None:
        worker = ranks[number]
        model = world.register(world.host(f"layout-{number}"), msgspec.structs.replace(spec, tp_rank=number))
        worker.spec, worker.layout, worker.memory = model.spec, model.layout, model.memory
        world.register_again(worker, incarnation)

    come_back(0, "first")
    if first_back == "rank":
        come_back(1, "second")
    word = replay(world, scheduler, ref, known)
    if first_back == "scheduler":
        assert scheduler.over() == []
        come_back(1, "second")
    assert scheduler.over() == [("t1", Code.RANK_LOST)]
    assert scheduler.fence[:16] != word
    assert failure(world, sink, ref) in (Code.RELEASED, Code.TRANSFER_UNKNOWN)
    for rank in ranks:
        rank.fill(IDS, TOKENS, seed=1)
    again = scheduler.publish("t2", IDS, TOKENS)
    assert sink.reads(again)


@pytest.mark.parametrize("first_back", ["scheduler", "member"])
def test_a_member_that_slept_while_its_home_was_away(world: World, first_back: str) -> None:
    home, member = world.host("p0"), world.host("p1")
    spec = spec_of("prefill", pp=2, home=home.endpoint, publish_implies_ready=True)
    world.register(home, spec)
    second = world.register(member, msgspec.structs.replace(spec, pp_rank=1))
    scheduler = world.attach(home, spec)
    known, ref = scheduler.known, scheduler.publish("t1", IDS, TOKENS)
    assert set(known) == {(Rank(0, 0), "first"), (Rank(1, 0), "first")}

    world.cut |= {("p0", "p1"), ("p1", "p0")}
    suspend(second)
    world.advance(1.0)
    home = world.host("p0")
    world.register(home, spec)
    scheduler = world.attach(home, spec)
    if first_back == "scheduler":
        replay(world, scheduler, ref, known)
        assert scheduler.over() == []
    second.resume()
    world.cut.clear()
    world.advance(10.0)
    assert len(second.received(wk.Registered)) == 2
    if first_back == "member":
        replay(world, scheduler, ref, known)
    assert scheduler.over() == [("t1", Code.RANK_LOST)]
    (sink,) = world.engine(world.host("d"), "decode")
    assert failure(world, sink, ref) in (Code.RELEASED, Code.TRANSFER_UNKNOWN)


@pytest.mark.parametrize("knows_it", [True, False])
def test_what_is_published_while_a_rank_sleeps_is_refused(world, knows_it):
    host = world.host("p")
    first, second = world.engine(host, "prefill", tp=2, publish_implies_ready=knows_it)
    named = first.known if knows_it else first.known[:1]  # before the second rank was there
    suspend(second)
    first.publish("t1", IDS, TOKENS, incarnations=named)
    assert first.over() == [("t1", Code.RANK_LOST)]


def test_sessions_are_reported_the_ranks_and_what_changes(world):
    host = world.host("p")
    spec = spec_of("prefill", tp=2)
    scheduler, stranger = world.attach(host, spec), world.attach(host, spec, uid=7)
    assert scheduler.received(wk.EngineRanks) == []
    first, second = world.engine(host, "prefill", tp=2)
    suspend(second)
    second.resume()
    reports = [((FIRST, "first"),), ((SECOND, "first"),), ((SECOND, "second"),)]
    assert [m.ranks for m in scheduler.received(wk.EngineRanks)] == reports
    assert [m.ranks for m in first.received(wk.EngineRanks)] == reports
    assert stranger.received(wk.EngineRanks) == []  # another user's, attached before the engine had ranks
    late = world.attach(host, spec)
    kinds = [type(m) for m in late.inbox]
    assert kinds.index(wk.EngineRanks) < kinds.index(wk.Registered)
    assert late.known == ((FIRST, "first"), (SECOND, "second"))


@pytest.mark.parametrize("incarnation", ["first", "", "x" * 900_000])
def test_a_resume_in_the_same_incarnation_or_none_is_refused(world, incarnation):
    (rank,) = world.engine(world.host("p"), "prefill")
    suspend(rank)
    rank.resume(incarnation)
    (refused,) = rank.received(wk.Refused)
    assert refused.code is Code.REGION_INVALID
    rank.resume()
    assert len(rank.received(wk.Registered)) == 2


def test_readiness_ends_when_its_rank_sleeps(world, sink):
    host = world.host("p")
    first, second = world.engine(host, "prefill", tp=2)
    second.ready("early")
    suspend(second)
    second.resume()
    ref = first.publish("early", IDS, TOKENS)
    ticket = sink.pull(ref, SINK_IDS, TOKENS, deadline_s=20.0)
    assert sink.ended(ticket) is None
    second.ready("early")
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)


def test_ready_of_memory_that_is_gone_releases_the_transfer(world):
    host = world.host("p")
    first, second = world.engine(host, "prefill", tp=2)
    suspend(second)
    second.resume()
    first.publish("t1", IDS, TOKENS)
    second.say(wk.Ready(transfer_id="t1", incarnation="first"))
    assert first.over() == [("t1", Code.RANK_LOST)]
    second.say(wk.Ready(transfer_id="t2", incarnation="first"))
    assert ("prefill", "g1") not in {key[0] for key in host.node.published.announced}


def test_a_members_readiness_that_is_late_speaks_for_the_memory_that_it_names(world, stages):
    first, second = stages
    world.hold_network = True
    second.ready("t1")
    late = [e for e in world.network if isinstance(PEER_MESSAGES.decode(e.payload), RankReady)]
    assert late
    world.network.clear()
    world.hold_network = False
    suspend(second)
    second.resume()
    world.advance(1.0)
    first.publish("t1", IDS, TOKENS, incarnations=((Rank(0, 0), "first"),))  # it does not name the member
    for envelope in late:
        world.arrive(envelope)
    assert first.over() == [("t1", Code.RANK_LOST)]


@pytest.mark.parametrize(
    ("incarnations", "code"),
    [
        ((), Code.TRANSFER_NOT_READY),
        (((FIRST, "first"),), Code.TRANSFER_NOT_READY),  # the second was not registered when it was called
        (((FIRST, "first"), (SECOND, "other")), Code.RANK_LOST),
        (((FIRST, "first"), (SECOND, "first"), (Rank(3, 3), "first")), Code.RANK_INVALID),
        (((FIRST, "first"), (SECOND, "x" * 999)), Code.RANK_INVALID),
    ],
    ids=["none", "too few", "another", "too many", "too long"],
)
def test_a_publish_that_implies_readiness_names_every_rank(world, incarnations, code):
    host = world.host("p")
    rank, _ = world.engine(host, "prefill", tp=2, publish_implies_ready=True)
    for worker in (rank, world.attach(host, rank.spec)):
        replay(world, worker, TransferRef(host.endpoint, "prefill", "g1", "t1", "ab" * 16), incarnations)
        assert worker.over() == [("t1", code)]


def test_ready_without_an_incarnation_costs_the_connection(world):
    (rank,) = world.engine(world.host("p"), "prefill")
    rank.say(wk.Ready(transfer_id="t1", incarnation=""))
    assert [m.code for m in rank.received(wk.Farewell)] == [Code.BAD_FRAME]


def test_a_grant_is_refused_where_a_rank_was_mapped_anew(world, monkeypatch):
    """No event does this, as `check_integrity` asserts; the check before each grant is the last of three."""
    monkeypatch.setattr(PublishedTransfers, "_check_memory", lambda *_: None)
    host = world.host("p")
    (rank,) = world.engine(host, "prefill")
    ref = rank.publish("t1", IDS, TOKENS)
    host.node.sessions[SessionId(rank.session)].rank.incarnation = "another"
    (sink,) = world.engine(world.host("d"), "decode")
    assert failure(world, sink, ref) is Code.RANK_LOST
    assert mover_of(rank).alive
    host.feed(ev.Tick())


# --- A publish lists the groups of every stage, and stages may hold different ones


def stages_of_groups(world: World, host: Host, only: int | None = None) -> list[Worker]:
    """Two stages whose groups have different names, or one of them."""
    workers = []
    for pp_rank, group in enumerate(["full", "window"]):
        if only not in (None, pp_rank):
            continue
        spec = spec_of("prefill", pp=2, pp_rank=pp_rank, publish_implies_ready=True)
        plain = attention_layout(
            spec=spec, layout="HND", num_kv_heads=2, head_dim=2, block_tokens=4, num_blocks=32
        )
        groups = tuple(msgspec.structs.replace(g, name=group) for g in plain.groups)
        tensors = tuple(msgspec.structs.replace(t, group=group) for t in plain.tensors)
        layout = msgspec.structs.replace(plain, groups=groups, tensors=tensors)
        workers.append(world.register_with(host, spec, layout))
    return workers


def publish_groups(worker: Worker, transfer_id: str, *groups: str, **more: object) -> None:
    """Publish the same blocks of those groups, by the ranks that the worker knows unless others are named."""
    blocks = {group: PackedBlocks(pack_ids(IDS)) for group in groups}
    facts = {"num_tokens": TOKENS, "fence_slot": next(worker.slots), "incarnations": worker.known} | more
    worker.say(wk.Publish(transfer_id=transfer_id, nonce="ab" * 16, blocks=blocks, **facts), b"w" * 16)


def test_a_publish_lists_the_groups_of_all_stages(world):
    host = world.host("p")
    stages = stages_of_groups(world, host)
    for worker in (*stages, world.attach(host, stages[0].spec)):
        name = f"t{worker.session}"
        publish_groups(worker, name, "full", "window")
        assert worker.over() == []
        publish_groups(worker, f"{name}-other", "full", "window", "other")
        publish_groups(worker, f"{name}-less", "full")
        first, second = worker.received(wk.PublishRefused)
        assert (first.code, second.code) == (Code.BLOCKS_INVALID, Code.BLOCKS_INVALID)
        assert "group 'other': the engine's groups are 'full', 'window'" in first.message
        assert "without blocks of group 'window'" in second.message


def test_a_group_of_a_stage_that_is_not_back_is_waited_for(world):
    host = world.host("p")
    stages = stages_of_groups(world, host)
    known = world.attach(host, stages[0].spec).known
    host = world.host("p")
    stages_of_groups(world, host, only=0)
    scheduler = world.attach(host, stages[0].spec)
    publish_groups(scheduler, "t", "full", "window", incarnations=known)
    assert scheduler.over() == [("t", Code.ENGINE_INCOMPLETE)]  # its client asks again
    stages_of_groups(world, host, only=1)
    publish_groups(scheduler, "t", "full", "window", incarnations=known)
    assert len(scheduler.over()) == 1


def test_a_transfer_grows_by_the_group_of_a_stage_that_comes_back(world):
    known = stages_of_groups(world, world.host("p"))[0].known
    host = world.host("p")
    (stage,) = stages_of_groups(world, host, only=0)
    # All that the engine has until its other stage is back:
    publish_groups(stage, "t", "full", incarnations=known, ready_tokens=TOKENS)
    stages_of_groups(world, host, only=1)
    added = {"window": PackedBlocks(pack_ids(IDS))}
    stage.say(wk.Ready(transfer_id="t", blocks=added, incarnation=stage.incarnation, ready_tokens=TOKENS))
    assert stage.over() == []
    stage.say(wk.Ready(transfer_id="t", blocks=added, incarnation=stage.incarnation, ready_tokens=TOKENS))
    assert stage.over() == [("t", Code.BLOCKS_INVALID)]  # now it has all its blocks


def test_a_state_is_listed_again_with_the_last_blocks(world):
    spec = spec_of("prefill", publish_implies_ready=True)
    plain = attention_layout(
        spec=spec, layout="HND", num_kv_heads=2, head_dim=2, block_tokens=4, num_blocks=32
    )
    (full,) = plain.groups
    state = msgspec.structs.replace(full, name=GroupName("state"), kind=GroupKind.STATE, block_tokens=0)
    tensors = [
        msgspec.structs.replace(one, group=state.name, component="ssm", token_stride=0)
        if one.component == "v"
        else one
        for one in plain.tensors
    ]
    layout = msgspec.structs.replace(plain, groups=(full, state), tensors=tuple(tensors))
    rank = world.register_with(world.host("p"), spec, layout)
    listed = PackedBlocks(pack_ids(IDS[:1]), state_at=TOKENS)
    blocks = {full.name: PackedBlocks(pack_ids(IDS[:1])), state.name: listed}
    facts = {"num_tokens": TOKENS, "fence_slot": next(rank.slots), "incarnations": rank.known}
    rank.say(wk.Publish(transfer_id="t", nonce="ab" * 16, blocks=blocks, ready_tokens=4, **facts), b"w" * 16)
    added = {full.name: PackedBlocks(pack_ids(IDS[1:])), state.name: listed}
    for over in ([], [("t", Code.BLOCKS_INVALID)]):  # now it has all its blocks
        rank.say(wk.Ready(transfer_id="t", blocks=added, incarnation=rank.incarnation))
        assert rank.over() == over


# --- what ranks report before the publish: whose memory it is of, how long it counts, what looks at it


RANK, MAPPING = Rank(0, 0), Incarnation("first")
ALL = Report(MAPPING, ALL_TOKENS)
KEY = EngineKey(EngineId("one"), Generation("g")), TransferId("t1")


@pytest.fixture
def announced(world: World) -> Announcements:
    return world.host("p").node.published.announced


def test_what_a_rank_said_early_goes_with_its_process(world):
    worker = world.engine(world.host("p"), "prefill")[0]
    announced, key = worker.host.node.published.announced, (worker.spec.key, TransferId("t1"))
    worker.ready("t1")
    assert dict(announced.take(key)) == {RANK: Report(Incarnation(worker.incarnation), ALL_TOKENS)}
    worker.ready("t1")
    worker.close()
    successor = world.connect(worker.host)
    successor.spec, successor.layout, successor.memory = worker.spec, worker.layout, worker.memory
    world.register_again(successor, "second")
    assert not announced.take(key)


def test_the_furthest_report_of_a_rank_counts_once(announced):
    for num_tokens in (8, 16, 12):
        announced.add(KEY, RANK, Report(MAPPING, num_tokens), 0)
    assert announced.take(KEY)[RANK].num_tokens == 16
    assert not announced.take(KEY)
    assert not list(announced)


def test_a_publish_takes_no_early_ready_of_other_memory_than_its_own(world):
    """A publisher may know a mapping that its daemon has not heard of, because the rank is away."""
    first, second = world.engine(world.host("p"), "prefill", tp=2)
    node = first.host.node
    key = (first.spec.key, TransferId("t1"))
    node.published.announced.add(key, Rank(0, 1), Report(Incarnation("another"), ALL_TOKENS), 0)
    first.publish("t1", [1], 4)
    (transfer,) = node.published.table.live.values()
    assert transfer.unready(first.spec) == [Rank(0, 1)]
    second.ready("t1")
    assert transfer.unready(first.spec) == []


def test_a_report_that_is_repeated_after_its_time_is_late_until_nobody_repeats_it(world, announced):
    """One of the same rank that is new counts, and another rank's is its own."""
    request = (BootId("member"), 7)
    world.advance(1)
    announced.add(KEY, RANK, ALL._replace(request=request), "member")
    world.advance(world.settings.transfer.lease_s - 1)
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


def test_a_report_that_is_replaced_counts_no_more_when_it_is_repeated(announced):
    boot = BootId("member")
    first, further, equal = (
        Report(MAPPING, num_tokens, (boot, number)) for number, num_tokens in ((1, 8), (2, 16), (3, 16))
    )
    for report in (first, further, equal):
        announced.add(KEY, RANK, report, 0)
    assert [announced.is_late(KEY, report) for report in (first, further, equal)] == [True, False, True]
