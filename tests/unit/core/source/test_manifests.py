"""One exchange fetches a whole engine, or says in words why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from kvxferd.config import PeerConfig
from kvxferd.core import Settings
from kvxferd.core import events as ev
from kvxferd.core.source import manifests as source_manifests
from kvxferd.errors import Code
from kvxferd.wire import mover as mv
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.common import Message
from kvxferd.wire.limits import MAX_DESCRIPTORS_PER_RANK
from kvxferd.wire.peer import ManifestReply, ManifestRequest
from tests.support.simulation import IDS, SINK_IDS, TOKENS, Host, Mover, Worker, World, spec_of


def fetch(world, host, engine="prefill", generation="g1", wait_s=5.0, pp_aware=True):
    request = ManifestRequest(
        request=1, engine_id=engine, generation=generation, wait_s=wait_s, pp_aware=pp_aware
    )
    return world.send_request(host, request)


def test_any_parallelism_is_read_by_any_other(world):
    sources = world.engine(world.host("p"), "prefill", pp=2, tp=2, layers=3)
    sinks = world.engine(world.host("d"), "decode", layout="NHD", pp=3, tp=1, layers=3, block_tokens=3)
    for source in sources:
        source.fill(IDS, TOKENS, seed=1)
    ref = sources[0].publish("t1", IDS, TOKENS)
    for source in sources[1:]:
        source.ready("t1")
    ids = [8, 6, 4, 2]
    for sink in sinks:
        assert isinstance(sink.ended(sink.pull(ref, ids, TOKENS)), wk.TicketDelivered)
        assert sink.num_wrong(ids, TOKENS, seed=1) == 0
    assert [m.why for m in sources[3].received(wk.Released)] == [Code.COMPLETED]


def test_an_incomplete_engine_is_waited_for_and_its_missing_ranks_named(world):
    host = world.host("p")
    spec = spec_of("prefill", pp=2, tp=2)
    world.register(host, spec)
    assert fetch(world, host) == []
    world.schedule.now += 5.1
    (refused,) = [effect.message for effect in host.node.feed(ev.Tick(), world.now)]
    assert refused.code is Code.ENGINE_INCOMPLETE
    assert "3 of its 4 ranks" in refused.message
    assert all(name in refused.message for name in ("pp0.tp1", "pp1.tp0", "pp1.tp1"))


def test_a_pull_goes_on_when_the_last_rank_comes(world, sink):
    host = world.host("p")
    spec = spec_of("prefill", tp=2)
    first = world.register(host, spec)
    ref = first.publish("t1", IDS, TOKENS)
    ticket = sink.pull(ref, SINK_IDS, TOKENS)
    assert sink.ended(ticket) is None
    last = world.register(host, msgspec.structs.replace(spec, tp_rank=1))
    last.ready("t1")
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)


def test_an_old_generation_is_refused_by_name_of_the_new(world):
    host = world.host("p")
    world.engine(host, "prefill", generation="g1")
    world.engine(host, "prefill", generation="g2")
    (refused,) = fetch(world, host, generation="g1")
    assert refused.code is Code.GENERATION_STALE
    assert "prefill@g2" in refused.message


def test_a_rank_does_not_read_its_own_engine(source):
    ticket = source.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS)
    assert source.ended(ticket).code is Code.NOT_ALLOWED


# --- A reader gets the metadata of all ranks, or is refused if it is not PP-aware and there are stages


def two_nodes(**sink_settings: bool) -> tuple[World, Host, Host]:
    """Return a world, a source that is PP-aware, and a sink with those settings."""
    world = World()
    source = world.host("p")
    world.settings = Settings(peer=PeerConfig(**sink_settings))
    return world, source, world.host("d")


def pull(sources: list[Worker], sink: Worker) -> wk.TicketDelivered | wk.PullFailed | None:
    """Publish at the source, read at the sink; return how the pull ended."""
    ref = sources[0].publish("t1", IDS, TOKENS)
    for source in sources[1:]:
        source.ready("t1")
    return sink.ended(sink.pull(ref, SINK_IDS, TOKENS))


def test_a_node_that_is_not_pp_aware_is_refused_by_the_source_with_what_to_do() -> None:
    world, source, sink = two_nodes(pp_aware=False)
    sources, (reader,) = world.engine(source, "prefill", pp=2), world.engine(sink, "decode")
    world.hold_network = True
    ref = sources[0].publish("t1", IDS, TOKENS)
    ticket = reader.pull(ref, SINK_IDS, TOKENS)
    sent = [PEER_MESSAGES.decode(envelope.payload) for envelope in world.network]
    world.hold_network = False
    world.settle()
    failed = reader.ended(ticket)
    assert failed.code is Code.NOT_PP_AWARE
    assert "the requesting node" in failed.message
    assert "peer.pp_aware" in failed.message
    assert not any(message.pp_aware for message in sent if isinstance(message, ManifestRequest))
    assert reader.num_wrong(SINK_IDS, TOKENS, seed=1)  # nothing moved


def test_it_refuses_the_stages_itself_where_the_source_does_not() -> None:
    world, source, sink = two_nodes(pp_aware=False)
    sources, (reader,) = world.engine(source, "prefill", pp=2), world.engine(sink, "decode")
    arrive: Callable[..., None] = world.arrive

    def arrive_changed(envelope) -> None:  # type: ignore[no-untyped-def]
        message = PEER_MESSAGES.decode(envelope.payload)
        if isinstance(message, ManifestRequest):
            envelope = replace(envelope, payload=encode(msgspec.structs.replace(message, pp_aware=True)))
        arrive(envelope)

    world.arrive = arrive_changed  # type: ignore[method-assign]
    failed = pull(sources, reader)
    assert failed.code is Code.NOT_PP_AWARE
    assert "this node" in failed.message
    assert "peer.pp_aware" in failed.message


def test_it_reads_engines_of_one_stage_and_its_own_stages_are_read() -> None:
    world, aware, legacy = two_nodes(pp_aware=False)
    sources, (reader,) = world.engine(aware, "prefill", tp=2), world.engine(legacy, "decode")
    assert isinstance(pull(sources, reader), wk.TicketDelivered)
    staged, (other,) = world.engine(legacy, "staged", pp=2), world.engine(aware, "turn-2")
    assert isinstance(pull(staged, other), wk.TicketDelivered)


def test_a_manifest_comes_in_pages_of_whole_ranks(world, monkeypatch):
    monkeypatch.setattr(source_manifests, "MAX_PAGE_BYTES", 1)
    source, sink = world.engine(world.host("p"), "prefill", tp=4), world.engine(world.host("d"), "decode")
    sent = []
    post = world.post
    world.post = lambda by, to, event, message: (sent.append(message), post(by, to, event, message))
    ref = source[0].publish("t", IDS, TOKENS)
    for rank in source:
        rank.fill(IDS, TOKENS, seed=1)
        rank.ready("t")
    ticket = sink[0].pull(ref, SINK_IDS, TOKENS)
    assert isinstance(sink[0].ended(ticket), wk.TicketDelivered)
    replies = [message for message in sent if isinstance(message, ManifestReply)]
    assert [len(reply.ranks) for reply in replies] == [1] * 4
    assert {reply.num_ranks for reply in replies} == {4}


def test_of_a_manifest_no_more_is_asked_for_than_its_user_may_keep(world, monkeypatch):
    """A peer may claim any number of ranks."""
    monkeypatch.setattr(source_manifests, "MAX_PAGE_BYTES", 1)
    source, sink = world.engine(world.host("p"), "prefill", tp=4), world.engine(world.host("d"), "decode")
    share = sink[0].host.node.handshake_client._learnt_bytes_share
    monkeypatch.setattr(share, "limit", 6000)
    ticket = sink[0].pull(source[0].publish("t", IDS, TOKENS), SINK_IDS, TOKENS)
    assert (sink[0].ended(ticket).code, share.held) == (Code.BUSY, 0)


class SegmentedMover(Mover):
    """A mover whose memory is in as many pieces as a rank may have, with NIXL's metadata of each."""

    are_alike = True

    def say(self, message: Message) -> None:
        """Send a message; what is bound is in pieces."""
        if isinstance(message, mv.Bound) and self.worker.spec.engine_id == "prefill":
            (region,) = message.regions
            size = region.size_bytes // MAX_DESCRIPTORS_PER_RANK
            pieces = ((MAX_DESCRIPTORS_PER_RANK, size),)
            if not self.are_alike:
                pieces = ((1, size - 1), (1, size + 1)) * (MAX_DESCRIPTORS_PER_RANK // 2)
            regions = (msgspec.structs.replace(region, pieces=pieces),)
            metadata = bytes(100 * MAX_DESCRIPTORS_PER_RANK)
            message = msgspec.structs.replace(message, regions=regions, metadata=metadata)
        super().say(message)


@pytest.mark.parametrize(
    ("are_alike", "num_ranks", "code"),
    [(True, 64, None), (False, 32, None), (False, 33, Code.REGION_INVALID)],
)
def test_an_engine_of_many_ranks_in_many_pieces_is_read(
    world: World, monkeypatch: pytest.MonkeyPatch, are_alike: bool, num_ranks: int, code: Code | None
) -> None:
    """Its manifest has 52 MB. Of pieces that are all unlike an engine has 262,144 at most."""
    monkeypatch.setattr(SegmentedMover, "are_alike", are_alike)
    world.mover_type = SegmentedMover
    sources = world.engine(world.host("p"), "prefill", pp=num_ranks, layers=num_ranks, block_tokens=64)
    (sink,) = world.engine(world.host("d"), "decode", layers=num_ranks, block_tokens=64)
    for source in sources:
        source.fill([3], TOKENS, seed=1)
    ref = sources[0].publish("t", [3], TOKENS)
    for source in sources:
        source.ready("t")
    ticket = sink.pull(ref, [7], TOKENS)
    assert getattr(sink.ended(ticket), "code", None) is code
    assert code is not None or sink.num_wrong([7], TOKENS, seed=1) == 0
