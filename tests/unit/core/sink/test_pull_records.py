"""The record of a pull names its peer, where it failed, and who did not reply."""

from __future__ import annotations

import pytest

from kvxferd.core import events as ev
from kvxferd.errors import Code
from kvxferd.ids import Rank
from kvxferd.records import PHASES, PullRecord, ReleaseRecord
from kvxferd.wire import mover as mv
from kvxferd.wire import peer
from tests.support.simulation import IDS, SINK_IDS, TOKENS, held_pull, mover_of


def record_of(sink) -> PullRecord:
    """The last pull's."""
    return [r for r in sink.host.records if isinstance(r, PullRecord)][-1]


def done(sink, **outcome) -> None:
    """The mover reports the end of its oldest pull."""
    mover = mover_of(sink)
    start = mover.started.popleft()
    mover.say(mv.PullDone(pull=start.pull, outcome=mv.PullOutcome(**{"delivered": False} | outcome)))


@pytest.mark.parametrize(
    ("outcome", "phase"),
    [
        ({"code": Code.RELEASED, "fence_s": 0.1}, "fence"),
        ({"code": Code.BLOCKS_INVALID, "started": False}, "plan"),
        ({"code": Code.REGION_INVALID}, "wire"),
    ],
)
def test_the_movers_outcome_tells_the_phase(world, source, sink, outcome, phase):
    held_pull(source, sink)
    done(sink, **outcome)
    record = record_of(sink)
    assert (record.failed_phase, record.silent) == (phase, "")
    assert record.failed_phase in PHASES


def test_a_request_that_starts_no_pull_is_recorded(world, source, sink):
    sink.pull(source.publish("t1", IDS, TOKENS), [SINK_IDS[0]] * len(SINK_IDS), TOKENS)
    record = record_of(sink)
    assert (record.outcome, record.code, record.transfer_id) == ("failed", Code.BLOCKS_INVALID, "t1")
    assert (record.peer, record.failed_phase) == (source.host.endpoint, "other")


def test_the_phases_of_a_pull_exclude_each_other_and_add_up(world, source, sink):
    held_pull(source, sink)
    world.advance(2.0)
    done(sink, delivered=True, queue_s=0.25, post_s=0.125, wire_s=0.5, fence_s=0.125)
    record = record_of(sink)
    assert sum(record.phases_s.values()) == pytest.approx(record.total_s)
    assert {phase: took_s for phase, took_s in record.phases_s.items() if took_s > 0.01} == {
        "connect": pytest.approx(1.125, abs=0.01),
        "queue": 0.25,
        "post": 0.125,
        "wire": 0.375,
        "fence": 0.125,
    }


def test_a_first_read_that_failed_is_no_phase_of_the_second(world, source, sink):
    held_pull(source, sink)
    world.advance(2.0)
    done(sink, code=Code.TRANSPORT, wire_s=2.0)
    world.advance(1.0)
    done(sink, delivered=True, wire_s=0.5)
    record = record_of(sink)
    assert record.retried
    assert record.phases_s["wire"] == 0.5
    assert sum(record.phases_s.values()) == pytest.approx(record.total_s)


@pytest.mark.parametrize("absurd", [float("nan"), float("inf"), -1.0])
def test_a_movers_absurd_figures_are_none_in_the_record(world, source, sink, absurd):
    held_pull(source, sink)
    done(sink, delivered=True, bytes=-7, runs=-7, wire_s=absurd, queue_s=absurd, predicted_s=absurd)
    record = record_of(sink)
    assert (record.outcome, record.bytes, record.runs, record.predicted_s) == ("delivered", 0, 0, 0.0)
    assert (record.phases_s["wire"], record.phases_s["queue"]) == (0.0, 0.0)


def test_at_a_deadline_a_peer_that_cannot_be_reached_is_named(world, source, sink):
    ref = source.publish("t1", IDS, TOKENS)
    world.cut.add((sink.host.name, source.host.name))
    ticket = sink.pull(ref, SINK_IDS, TOKENS, deadline_s=2)
    world.advance(2.1)
    record = record_of(sink)
    assert (record.code, record.failed_phase) == (Code.DEADLINE, "handshake")
    assert record.silent == source.host.endpoint
    assert record.silent in sink.ended(ticket).message


def test_at_a_deadline_a_publisher_is_named_whose_daemon_is_there(world, source, sink):
    """The transfer is never ready: the source's daemon waits as long as the pull does."""
    sink.pull(source.publish("t0", IDS, TOKENS), SINK_IDS, TOKENS)
    (slow,) = world.engine(world.host("q"), "slow", publish_implies_ready=False)
    ref = world.attach(slow.host, slow.spec).publish("t1", IDS, TOKENS)
    ticket = sink.pull(ref, SINK_IDS, TOKENS, deadline_s=2)
    world.advance(2.1)
    record = record_of(sink)
    assert (record.code, record.failed_phase) == (Code.DEADLINE, "grant")
    assert record.silent == "the publisher or a rank of engine slow"
    message = sink.ended(ticket).message
    assert f"{slow.host.endpoint} is there, and waits for engine slow@g1: ranks pp0.tp0 have not" in message


def test_at_a_deadline_the_rank_is_named_that_a_mover_reads_from(world, source, sink):
    ticket = held_pull(source, sink, deadline_s=2)
    mover_of(sink).hold = False  # from here on it reports that it waits for a read
    world.advance(2.1)
    record = record_of(sink)
    assert (record.code, record.failed_phase) == (Code.DEADLINE, "wire")
    assert record.silent == "rank pp0.tp0 of engine prefill"
    message = sink.ended(ticket).message
    assert f"rank pp0.tp0 of engine prefill, whose daemon is {source.host.endpoint}" in message


@pytest.mark.parametrize("mute", [True, False])
def test_at_a_deadline_the_local_mover_is_named_if_it_has_posted_no_read(world, source, sink, mute):
    ticket = held_pull(source, sink, deadline_s=2)
    mover_of(sink).mute = mute
    world.advance(2.1)
    record = record_of(sink)
    assert record.silent == "the mover of rank pp0.tp0 of engine decode"
    assert ("did not reply" in sink.ended(ticket).message) == mute


def test_many_pulls_with_one_deadline_ask_for_their_engine_once(world, source, sink, monkeypatch):
    ref = source.publish("t", IDS, TOKENS)
    assert sink.reads(ref)
    sink.host.node.handshake_client.forget_engine(ref.endpoint, ref.engine)
    sent: list[str] = []
    monkeypatch.setattr(world, "post", lambda *posted: sent.append(type(posted[-1]).__name__))  # all is lost
    for number in range(20):
        sink.pull(source.publish(f"t{number}", IDS, TOKENS), SINK_IDS, TOKENS, deadline_s=1.5)
    world.advance(1.4)
    assert sent.count("ManifestRequest") == 2


def test_the_source_records_who_has_read_and_how_much(world, source, sink):
    sink.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS)
    pulled = record_of(sink)
    (released,) = [r for r in source.host.records if isinstance(r, ReleaseRecord)]
    assert pulled.transfer_id == released.transfer_id
    (reader,) = released.readers
    assert (reader.engine_id, reader.num_ranks) == (pulled.sink, 1)
    assert reader.peers == (sink.host.endpoint,)
    assert reader.bytes == released.bytes == pulled.bytes > 0
    assert released.peer == sink.host.endpoint


def test_a_peer_cannot_report_more_than_there_is_nor_twice(world, source, sink):
    ref = source.publish("t1", IDS, TOKENS, num_readers=2)
    sink.pull(ref, SINK_IDS, TOKENS)
    (transfer,) = source.host.node.published.table.live.values()
    once = transfer.num_bytes_read
    for rank in (Rank(0, 0), Rank(0, 1)):
        consumer = peer.Consumer(sink.spec.engine_id, sink.spec.generation, rank, 2)
        message = peer.Acknowledge(request=9, grant="g", ref=ref, consumer=consumer, bytes=1 << 60)
        source.host.feed(ev.PeerRequest(b"d", message, ""))
    # 3 blocks of 4 tokens, 2 layers, K and V, 2 heads of 2 x 2 bytes
    assert transfer.num_bytes_read == once + 3 * 4 * 2 * 2 * 2 * 4


@pytest.mark.parametrize(
    ("endpoint", "key", "kept"),
    [
        ("tcp://10.0.0.9:9441", "", True),
        ("tcp://10.0.0.9:9441", "ab" * 32, True),
        (f"tcp://10.0.0.9:9441#{'ab' * 32}", "ab" * 32, True),
        (f"tcp://10.0.0.9:9441#{'cd' * 32}", "ab" * 32, False),
        ("tcp://10.0.0.9:9441\x1b[2J", "", False),
    ],
)
def test_a_peer_cannot_claim_anothers_key_nor_odd_text(world, source, endpoint, key, kept):
    hello = peer.PeerHello(request=1, versions=peer.PEER_VERSIONS, boot="b", endpoint=endpoint)
    source.host.feed(ev.PeerRequest(b"odd", hello, key))
    assert source.host.node.peer_routes.endpoint_of(b"odd") == (endpoint if kept else "")
