"""An engine whose stages register with daemons on several nodes is one engine at its home."""

from __future__ import annotations

import msgspec
import pytest

from kvxferd.core import events as ev
from kvxferd.core.limits.table import EARLY_READY
from kvxferd.errors import Code
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import PEER_MESSAGES
from kvxferd.wire.peer import JoinRank, RequestDone
from tests.support.simulation import IDS, SINK_IDS, TOKENS, manifest_of, mover_of, spec_of


def record_of(home):
    """The second stage, as its home has it; None: it has not joined."""
    (engine,) = home.node.registry
    return engine.ranks.get((1, 0))


def late_join(record, member):
    """The request that joined the rank, as it arrives again."""
    secret = member.node.member._secret
    return JoinRank(request=record.request, boot=record.boot, manifest=record.joined, secret=secret)


def test_every_source_mover_polls_before_the_grant(world, stages, reader):
    movers = [m for s in stages for m in s.host.movers.values()]
    assert not any(m.attended for m in movers)
    ref = stages[0].publish("t1", IDS, TOKENS)
    stages[1].ready("t1")
    reader.say(wk.Prepare(ref=ref))
    assert all(m.attended for m in movers)
    assert reader.reads(ref)
    at_home, at_member = world.settings.polling_linger_s, world.settings.polling_linger_s
    world.advance(at_home + world.settings.member_heartbeat_s + at_member + 0.1)
    assert not any(m.attended for m in movers)


def test_a_publish_away_from_home_is_refused_by_name(world, stages):
    stages[1].publish("t1", IDS, TOKENS)
    (refused,) = stages[1].received(wk.PublishRefused)
    assert refused.code is Code.NOT_HOME
    assert "tcp://p0:9441" in refused.message


def test_a_members_worker_that_dies_voids_the_engines_transfers(world, stages, reader):
    ref = stages[0].publish("t1", IDS, TOKENS)
    word = bytes(stages[0].fence[:16])
    stages[1].close()
    assert [m.why for m in stages[0].received(wk.Released)] == [Code.RANK_LOST]
    assert bytes(stages[0].fence[:16]) != word
    ticket = reader.pull(ref, SINK_IDS, TOKENS)
    world.advance(6)
    assert isinstance(reader.ended(ticket), wk.TicketFailed)


def test_a_refusal_waits_until_no_mover_can_map_the_memory(world):
    """A client takes a refusal to its `resume`, or while it suspends, for leave to unmap its memory."""
    worker = world.register(
        world.host("p1"),
        msgspec.structs.replace(spec_of("prefill", pp=2, layers=4, home="tcp://p0:9441"), pp_rank=1),
    )
    mover = mover_of(worker)
    kills: list[str] = []
    mover.die = lambda: kills.append(mover.agent)
    world.advance(11)
    assert kills == [mover.agent]
    assert not worker.received(wk.Refused)
    del mover.die
    mover.die()
    assert [m.code for m in worker.received(wk.Refused)] == [Code.HOME_UNREACHABLE]


def test_a_home_that_gets_no_reply_releases_again_and_the_rank_is_told_once(world, stages):
    stages[0].publish("t1", IDS, TOKENS)
    world.cut.add(("p1", "p0"))  # replies are lost
    stages[0].say(wk.Unpublish(transfer_id="t1"))
    world.advance(3 * world.settings.peer.request_timeout_s)
    assert [m.why for m in stages[1].received(wk.Released)] == [Code.UNPUBLISHED]
    world.cut.clear()


def test_a_rank_that_wakes_without_its_home_stays_suspended_and_wakes_with_it(world, stages, reader):
    member = stages[1]
    member.say(wk.Suspend())
    assert member.received(wk.Suspended)
    world.cut |= {("p0", "p1"), ("p1", "p0")}
    member.resume()
    world.advance(11)
    (refused,) = member.received(wk.Refused)
    assert (refused.request, refused.code) == (2, Code.HOME_UNREACHABLE)
    assert not [mover for mover in member.host.movers.values() if mover.alive]
    world.cut.clear()
    member.resume("third", request=3)
    world.advance(2)
    assert [reply.request for reply in member.received(wk.Registered)] == [1, 3]
    for stage in stages:
        stage.fill(IDS, TOKENS, seed=1)
    ref = stages[0].publish("t1", IDS, TOKENS)
    member.say(wk.Ready(transfer_id="t1", incarnation="third"))
    assert reader.reads(ref)


def test_a_home_refuses_a_rank_that_disagrees(world):
    home, other = world.host("p0"), world.host("p1")
    spec = spec_of("prefill", pp=2, layers=4, home=home.endpoint)
    world.register(home, spec)
    worker = world.register(other, msgspec.structs.replace(spec, pp_rank=1, fingerprint="other"))
    (refused,) = worker.received(wk.Refused)
    assert refused.code is Code.SHAPE_MISMATCH


def test_a_members_mover_that_is_replaced_is_joined_anew(world, stages, reader):
    first = stages[0].publish("t0", IDS, TOKENS)
    stages[1].ready("t0")
    assert reader.reads(first)
    next(iter(stages[1].host.movers.values())).die()
    world.advance(1)
    ref = stages[0].publish("t1", IDS, TOKENS)
    stages[1].ready("t1")
    assert reader.reads(ref)
    assert reader.num_wrong(SINK_IDS, TOKENS, seed=1) == 0


def test_a_late_join_of_a_former_mover_changes_nothing(world, home, member):
    """The home would otherwise have the former agent, and could not end the present one's polling."""
    record = record_of(home)
    late = late_join(record, member)
    next(iter(member.movers.values())).die()
    world.advance(1)
    present = record_of(home).agent
    assert present != record.agent
    home.feed(ev.PeerRequest(record.route, late))
    assert record_of(home).agent == present


@pytest.mark.parametrize("ends", ["its mover is replaced", "its worker leaves"])
def test_a_join_without_a_reply_is_not_sent_again_after_what_followed(world, stages, home, member, ends):
    """Sent again, it would give the home the former mover's agent back, or the rank that left."""
    world.cut.add(("p0", "p1"))  # the home hears, and its replies are lost
    world.advance(world.settings.member_heartbeat_s + 0.01)
    if ends == "its mover is replaced":
        next(iter(member.movers.values())).die()
        world.advance(1)
        wanted = next(iter(member.node.registry)).ranks[1, 0].agent
        assert wanted
    else:
        stages[1].close()
        wanted = None
    for _ in range(40):
        world.advance(0.1)
        record = record_of(home)
        assert (None if record is None else record.agent) == wanted


def test_ready_that_was_said_before_the_rank_joined_again_is_not_lost(world, stages, reader):
    next(iter(stages[1].host.movers.values())).die()
    ref = stages[0].publish("t1", IDS, TOKENS)
    stages[1].ready("t1")  # its mover is not there yet, nor known at home
    world.advance(5)
    assert reader.reads(ref)


def test_a_repeated_ready_does_not_speak_for_the_next_transfer_of_an_id_that_was_never_published(
    world, stages, reader
):
    """Such an id has no tombstone. Its rank's word is forgotten after `lease_s`, and repeated for longer."""
    world.cut.add(("p0", "p1"))  # the home hears, and its replies are lost
    stages[1].ready("t1")
    world.advance(world.settings.transfer.lease_s + 1)
    ref = stages[0].publish("t1", IDS, TOKENS)
    ticket = reader.pull(ref, SINK_IDS, TOKENS)
    world.cut.clear()
    world.advance(2 * world.settings.peer.request_timeout_s)
    assert reader.ended(ticket) is None
    stages[1].ready("t1")
    assert isinstance(reader.ended(ticket), wk.TicketDelivered)


def test_a_member_that_could_not_be_asked_to_poll_is_asked_again_by_the_next_reader(world, stages, reader):
    stages[1].ready("t1")
    ref = stages[0].publish("t1", IDS, TOKENS, lease_s=600.0)
    world.cut.add(("p0", "p1"))
    reader.say(wk.Prepare(ref=ref))
    for _ in range(6):
        ticket = reader.pull(ref, SINK_IDS, TOKENS, deadline_s=30)  # somebody asks all the time
        world.advance(2)
    world.cut.clear()
    ticket = reader.pull(ref, SINK_IDS, TOKENS, deadline_s=9)
    world.advance(4)
    assert isinstance(reader.ended(ticket), wk.TicketDelivered)


def test_a_member_of_whom_nothing_is_heard_for_very_long_is_forgotten(world, home):
    del world.hosts["p1"]
    world.advance(world.settings.tombstone_s - 10)
    assert record_of(home)
    world.advance(20)
    assert not record_of(home)


def test_a_generation_of_which_nothing_is_heard_replaces_no_other(world, stages, reader):
    """Its last rank died with its node, which could not say so."""
    registry, spec = stages[0].host.node.registry, stages[0].spec
    later = msgspec.structs.replace(spec, generation="g2")
    beside = world.register(stages[0].host, later)
    assert world.register(world.host("p2"), msgspec.structs.replace(later, pp_rank=1)).received(wk.Registered)
    beside.close()
    assert registry.successor(spec.key) == later.key
    del world.hosts["p2"]
    world.advance(world.settings.member_silent_after_s + 0.1)
    assert registry.successor(spec.key) is None
    assert registry.successor(later.key) is None, "nor is it replaced by one that started earlier"
    ref = stages[0].publish("t1", IDS, TOKENS)
    stages[1].ready("t1")
    assert reader.reads(ref)


@pytest.mark.parametrize("is_reply_lost", [False, True])
def test_what_a_member_has_reported_is_reported_again_to_a_home_that_restarted(
    world, stages, reader, is_reply_lost
):
    """Else the transfer, which its publisher publishes anew, would wait for the rank until its lease ends."""
    stages[1].ready("t1")
    world.advance(1)
    home = world.host("p0")  # another daemon on the same endpoint
    again = world.register(home, stages[0].spec)
    again.fill(IDS, TOKENS, seed=1)
    if is_reply_lost:
        world.cut.add(("p0", "p1"))
        world.advance(3.5)
        world.cut.clear()
    world.advance(10)
    ref = again.publish("t1", IDS, TOKENS)
    assert reader.reads(ref)


def test_a_late_heartbeats_reply_does_not_end_the_polling_that_was_asked_for_since(world, stages, reader):
    (mover,) = stages[1].host.movers.values()
    stages[1].ready("t1")
    ref = stages[0].publish("t1", IDS, TOKENS, lease_s=600.0)
    world.hold_network = True
    world.advance(world.settings.member_heartbeat_s)
    (join,) = [e for e in world.network if isinstance(PEER_MESSAGES.decode(e.payload), JoinRank)]
    world.network.remove(join)
    world.arrive(join)
    (late,) = [e for e in world.network if isinstance(PEER_MESSAGES.decode(e.payload), RequestDone)]
    world.network.remove(late)
    world.hold_network = False
    reader.say(wk.Prepare(ref=ref))
    assert mover.attended
    world.arrive(late)
    world.advance(world.settings.polling_linger_s + 0.1)
    assert mover.attended


def test_an_agent_that_is_another_ranks_is_not_joined(world, home):
    record = record_of(home)
    spec = msgspec.structs.replace(record.spec, engine_id="other")
    manifest = msgspec.structs.replace(manifest_of(record), spec=spec)
    said = JoinRank(request=9, boot="evil", manifest=manifest, secret="guessed")
    (effect,) = home.node.feed(ev.PeerRequest(b"evil", said), world.now)
    assert effect.message.code is Code.RANK_TAKEN


def test_a_rank_that_a_worker_of_the_home_holds_is_not_joined(world, stages, home):
    record = record_of(home)
    spec = msgspec.structs.replace(record.spec, pp_rank=0)
    binding = msgspec.structs.replace(record.joined.binding, agent="evil/1")
    manifest = msgspec.structs.replace(record.joined, spec=spec, binding=binding)
    said = JoinRank(request=9, boot="evil", manifest=manifest, secret="guessed")
    (effect,) = home.node.feed(ev.PeerRequest(b"evil", said), world.now)
    assert effect.message.code is Code.RANK_TAKEN
    assert "another worker holds it" in effect.message.message


def test_reports_that_wait_for_a_rank_to_join_do_not_keep_it_from_joining(world, stages, member, monkeypatch):
    """They are repeated for minutes, and count as their user's open requests."""
    monkeypatch.setattr(member.node.peers._open_request_share, "limit", 4)
    world.cut.add(("p1", "p0"))
    for number in range(8):
        stages[1].ready(f"early{number}")
    home = world.host("p0")  # another daemon on the same endpoint
    world.cut.clear()
    world.register(home, stages[0].spec)
    world.advance(10)
    assert record_of(home)


def test_a_report_is_one_request_and_ends_with_its_rank(world, stages, member):
    """A home that has no room for it sends no reply, and each home that is new is told again."""
    share = member.node.peers._open_request_share
    stages[1].ready("early")
    for _ in range(3):
        home = world.host("p0")  # another daemon on the same endpoint
        home.node.context.ledger[EARLY_READY].limit = 0
        world.register(home, stages[0].spec)
        world.advance(10)
    assert share.held == 1
    stages[1].close()
    world.advance(1)
    assert share.held == 0


@pytest.mark.parametrize("lost", ["on the way", "for want of room"])
def test_a_report_outlives_its_mover(world, stages, reader, lost):
    """The memory is the same with the next one, and the worker does not say it again."""
    ledger = stages[0].host.node.context.ledger
    limit = ledger[EARLY_READY].limit
    if lost == "on the way":
        world.cut.add(("p1", "p0"))
    else:
        ledger[EARLY_READY].limit = 0
    stages[1].ready("t1")
    world.advance(3)
    mover_of(stages[1]).die()
    world.advance(2)
    world.cut.clear()
    ledger[EARLY_READY].limit = limit
    world.advance(5)
    assert reader.reads(stages[0].publish("t1", IDS, TOKENS))


def test_reports_of_progress_keep_the_peer_that_is_greeted(world, stages, member):
    """Were it forgotten with each that takes another's place, it would be dialled anew each time."""
    home = stages[0].host.endpoint
    world.advance(0.1)
    member.node.peers.disconnected(home, "cut")
    world.cut |= {("p0", "p1"), ("p1", "p0")}
    stages[1].ready("t1", 1)
    greeted = member.node.peers.get(home)
    for tokens in range(2, 20):
        stages[1].ready("t1", tokens)
        world.advance(0.05)
        assert member.node.peers.get(home) is greeted


def test_a_report_that_found_no_room_is_sent_once_there_is_some(world, stages, reader, monkeypatch):
    """The room may be taken by pulls that wait for just this report."""
    share = stages[1].host.node.peers._open_request_share
    ticket = reader.pull(stages[0].publish("t1", IDS, TOKENS), SINK_IDS, TOKENS)
    with monkeypatch.context() as full:
        full.setattr(share, "limit", 0)
        stages[1].ready("t1")
    assert reader.ended(ticket) is None
    world.advance(3.0)
    assert isinstance(reader.ended(ticket), wk.TicketDelivered)
