"""What another daemon may say, by mistake or on purpose, without harm to anybody but itself."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from kvxferd.core import events as ev
from kvxferd.core.limits.table import GRANTS, WAITING_BYTES
from kvxferd.core.peers.manifest_checks import LayoutCache, check_manifest, checked_layouts
from kvxferd.core.ranks import home as core_home
from kvxferd.core.sink.manifests import MAX_ENGINES_PER_PEER
from kvxferd.core.source import grants as grant_server
from kvxferd.core.source.transfer_table import MAX_READERS
from kvxferd.errors import Code, EngineError, PeerError
from kvxferd.ids import Endpoint, Rank
from kvxferd.layout import PackedBlocks, RegionSpec, pack_ids
from kvxferd.wire import mover as mv
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.common import Message, TransferRef
from kvxferd.wire.limits import MAX_FRAME_BYTES, MAX_METADATA_BYTES
from kvxferd.wire.outlines import PEER_OUTLINES
from kvxferd.wire.peer import (
    Acknowledge,
    Consumer,
    GrantReply,
    GrantRequest,
    JoinRank,
    ManifestReply,
    PeerRefused,
    RankPollingRequest,
    ReleaseGrant,
    RenewGrants,
    RequestDone,
    TransferReleased,
)
from tests.support.simulation import (
    IDS,
    SINK_IDS,
    TOKENS,
    Host,
    Worker,
    World,
    delivers,
    manifest_of,
)


def tamper(world: World, kind: type[Message], **changes: object) -> None:
    """Change the next message of a kind that is under way, and let everything arrive."""
    while world.network:
        envelope = world.network.popleft()
        message = PEER_MESSAGES.decode(envelope.payload)
        if isinstance(message, kind):
            envelope.payload = encode(msgspec.structs.replace(message, **changes))
        world.arrive(envelope)


def blocks_of(ids: Iterable[int]) -> dict[str, PackedBlocks]:
    return {"full": PackedBlocks(pack_ids(ids))}


@pytest.mark.parametrize(
    ("nonsense", "code"),
    [
        ({"lease_s": 0.0}, Code.BAD_FRAME),
        ({"lease_s": -1.0}, Code.BAD_FRAME),
        ({"lease_s": float("nan")}, Code.BAD_FRAME),
        ({"lease_s": float("inf")}, Code.BAD_FRAME),
        ({"lease_s": 1e-9}, Code.BAD_FRAME),
        pytest.param({"fence_word": b""}, Code.BAD_FRAME, id="a word of no length"),
        ({"fence_address": -1}, Code.BAD_FRAME),
        ({"fence_address": 0}, Code.BAD_FRAME),
        ({"fence_address": 2**63 - 1}, Code.BAD_FRAME),
        ({"fence_address": 2**64 - 20}, Code.BAD_FRAME),
        ({"fence_agent": ""}, Code.BAD_FRAME),
        ({"fence_agent": "x" * 300}, Code.BAD_FRAME),
        ({"fence_metadata": bytes(MAX_METADATA_BYTES + 1)}, Code.BAD_FRAME),
        ({"blocks": {}}, Code.TOKENS_NOT_PUBLISHED),
        ({"blocks": blocks_of([-1] * len(IDS))}, Code.BLOCKS_INVALID),
        ({"blocks": blocks_of(range(1 << 20, (1 << 20) + len(IDS)))}, Code.BLOCKS_INVALID),
    ],
)
def test_a_grant_that_makes_no_sense_fails_its_pull_and_nothing_else(world, source, sink, nonsense, code):
    world.hold_network = True
    ticket = sink.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS)
    tamper(world, GrantReply, **nonsense)
    assert sink.ended(ticket).code is code
    assert sink.ended(ticket).safe_to_reuse
    world.hold_network = False
    assert delivers(source, sink, "t2")
    world.advance(100)
    assert source.host.node.is_idle


def test_a_peer_cannot_describe_another_peers_agent(world, source, sink):
    """What it says of the agent would replace how the agent is reached, for every later pull of it."""
    assert delivers(source, sink, "t1")
    (agent,) = {mover.agent for mover in source.host.movers.values()}
    liar = world.engine(world.host("liar"), "liar")[0]
    world.hold_network = True
    ticket = sink.pull(liar.publish("t2", IDS, TOKENS), SINK_IDS, TOKENS)
    tamper(world, GrantReply, fence_agent=agent, fence_metadata=b"elsewhere")
    failed = sink.ended(ticket)
    assert (failed.code, failed.safe_to_reuse) == (Code.BAD_FRAME, True)
    assert f"agent {agent}" in failed.message
    world.hold_network = False
    assert delivers(source, sink, "t3")
    world.advance(100)
    assert liar.host.node.is_idle
    assert source.host.node.is_idle


def test_what_is_known_of_engines_is_bounded_and_goes_with_its_last_reader(world, sink):
    """A manifest may be of 16 MiB, and whoever writes references may have any number of peers."""
    sources = [world.engine(world.host(f"p{number}"), f"prefill{number}")[0] for number in range(4)]
    refs = [source.publish("t1", IDS, TOKENS) for source in sources]
    shares = sink.host.node.handshake_client._learnt_bytes_share
    assert sink.reads(refs[0])
    one = shares.held
    shares.limit = 3 * one  # of which the last eighth is for other users
    for ref in refs[1:]:
        assert sink.reads(ref)
    assert shares.held == 2 * one
    refs = [source.publish("t2", IDS, TOKENS) for source in sources]
    for ref in refs[:2]:
        sink.say(wk.Prepare(ref=ref))
    failed = sink.ended(sink.pull(refs[2], SINK_IDS, TOKENS))
    assert (failed.code, failed.safe_to_reuse) == (Code.BUSY, True)
    sink.say(wk.Abandon(ref=refs[0]))
    assert sink.reads(refs[2])
    sink.close()
    for source in sources:
        sink.host.node.peers.drop(source.host.endpoint)
    assert shares.held == 0


def test_an_agent_stays_the_peers_that_named_it_first_when_a_read_has_failed(world, source, sink):
    """A copy of an honest manifest with an address that is not there makes the mover drop the agent."""
    assert delivers(source, sink, "t1")
    (agent,) = {mover.agent for mover in source.host.movers.values()}
    movers, (mover,) = sink.host.node.movers, sink.host.movers
    movers.drop_remote(mover, agent)
    with pytest.raises(PeerError, match=f"it is an agent of {source.host.endpoint}"):
        movers.load_remotes(mover, Endpoint("tcp://liar:9441"), [(agent, b"elsewhere", 0)])
    assert delivers(source, sink, "t2")


# --- engines that span nodes


def hear(world: World, host: Host, endpoint: str, message: Message) -> None:
    """A message on the connection that the host opened to that endpoint."""
    host.feed(ev.PeerReply(endpoint, message))


def test_only_an_engines_home_can_tell_its_ranks_of_a_release(world, source, stages):
    source.publish("t1", IDS, TOKENS)
    released = TransferReleased(
        request=7, engine_id="prefill", generation="g1", transfer_id="t1", why=Code.COMPLETED
    )
    for worker in (source, stages[1]):
        hear(world, worker.host, "tcp://evil:9441", released)
        assert not worker.received(wk.Released)
    hear(world, stages[1].host, stages[0].host.endpoint, released)
    assert stages[1].received(wk.Released)


def test_only_a_ranks_home_can_have_its_mover_poll(world, source, stages):
    for host, worker in ((source.host, source), (stages[1].host, stages[1])):
        (mover,) = [m for m in host.movers.values() if m.worker is worker]
        hear(world, host, "tcp://evil:9441", RankPollingRequest(request=7, agent=mover.agent))
        assert not mover.attended
        assert not any(rank.polling_request for rank in host.node.registry.local_ranks())


def joining(world: World, worker: Worker, **changes: object) -> JoinRank:
    """What the worker's daemon says of its rank, changed."""
    rank = worker.host.node.sessions[worker.session].rank
    assert rank is not None
    spec = msgspec.structs.replace(rank.spec, **changes)
    manifest = msgspec.structs.replace(manifest_of(rank), spec=spec)
    node = worker.host.node
    return JoinRank(request=7, boot=node.context.boot, manifest=manifest, secret=node.member._secret)


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"engine_id": "new", "pp_size": 1 << 20, "tp_size": 1 << 20}, Code.RANK_INVALID),
        ({"engine_id": "x" * 300}, Code.RANK_INVALID),
        ({"engine_id": "new", "home": ""}, Code.NOT_HOME),
        ({"engine_id": "new", "home": "tcp://elsewhere:1"}, Code.NOT_HOME),
        ({"engine_id": "new", "home": "ipc:///tmp/x"}, Code.ENDPOINT_INVALID),
    ],
)
def test_a_rank_that_cannot_be_is_not_joined(world, stages, changes, code):
    home = stages[0].host
    (refused,) = world.send_request(home, joining(world, stages[1], **changes))
    assert refused.code is code
    assert len(list(home.node.registry)) == 1


def test_a_binding_of_other_regions_than_the_layouts_is_not_joined(world, stages):
    request = joining(world, stages[1])
    binding = msgspec.structs.replace(request.manifest.binding, regions=())
    manifest = msgspec.structs.replace(request.manifest, binding=binding)
    (refused,) = world.send_request(stages[0].host, msgspec.structs.replace(request, manifest=manifest))
    assert refused.code is Code.REGION_INVALID


@pytest.mark.parametrize("changes", [{"engine_id": "other"}, {"tp_size": 2}, {"pp_size": 1 << 62}])
def test_a_manifest_that_makes_no_sense_fails_its_pull(world, source, sink, changes):
    world.hold_network = True
    ticket = sink.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS)
    rank = source.host.node.sessions[source.session].rank
    manifest = msgspec.structs.replace(
        manifest_of(rank), spec=msgspec.structs.replace(manifest_of(rank).spec, **changes)
    )
    tamper(world, ManifestReply, ranks=(manifest,))
    assert sink.ended(ticket).code in (Code.BAD_FRAME, Code.ENGINE_INCOMPLETE, Code.RANK_INVALID)


def test_a_manifest_that_names_one_rank_many_times_fails_its_pull(world, source, sink):
    """Checking it would take as long as checking so many ranks."""
    world.hold_network = True
    ticket = sink.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS)
    one = manifest_of(source.host.node.sessions[source.session].rank)
    tamper(world, ManifestReply, ranks=(one,) * 3)
    assert sink.ended(ticket).code is Code.LAYOUT_INVALID


def test_a_refusal_as_long_as_a_message_may_be_is_handed_on_in_short(world, source, sink):
    world.hold_network = True
    ticket = sink.pull(source.publish("t1", IDS, TOKENS, num_readers=3), SINK_IDS, TOKENS)
    world.advance(1)
    requests = [PEER_MESSAGES.decode(e.payload) for e in world.network]
    world.network.clear()
    long = PeerRefused(request=requests[0].request, code=Code.INTERNAL, message="x" * (8 << 20))
    hear(world, sink.host, source.host.endpoint, long)
    assert sink.ended(ticket).code is Code.INTERNAL
    assert len(encode(sink.ended(ticket))) < MAX_FRAME_BYTES


def test_blocks_of_groups_that_nobody_reads_do_not_reach_the_mover(world, source, sink):
    mover = next(iter(sink.host.movers.values()))
    mover.hold = True
    world.hold_network = True
    sink.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS)
    many = {f"{n}" * 100: PackedBlocks(b"") for n in range(100)}
    tamper(world, GrantReply, blocks=many | {"full": PackedBlocks(pack_ids(IDS))})
    assert [set(start.remote) for start in mover.started] == [{"full"}]


# --- grants


def grant_of(world: World, source: Worker, ref, grant: str = "g", num_ranks: int = 1, **more) -> GrantRequest:
    rank = source.host.node.sessions[source.session].rank
    return GrantRequest(
        request=5,
        grant=grant,
        ref=ref,
        consumer=Consumer("decode", "g1", Rank(0, 0), num_ranks),
        reads=((Rank(0, 0), rank.agent),),
        wait_s=5.0,
        **more,
    )


def test_one_grants_name_on_two_transfers_is_refused(world, source):
    first, second = (source.publish(f"t{n}", [n], 4) for n in range(2))
    world.send_request(source.host, grant_of(world, source, first))  # its mover begins to poll
    source.host.feed(ev.PeerRequest(b"stranger", grant_of(world, source, first)))
    source.host.node.context.pop_effects()
    (mover,) = source.host.movers.values()
    source.host.feed(ev.MoverMessage(mover.mover, mv.Polling(token=0)))
    (granted,) = world.send_request(source.host, grant_of(world, source, first))
    assert isinstance(granted, GrantReply)
    (refused,) = world.send_request(source.host, grant_of(world, source, second))
    assert refused.code is Code.OUT_OF_PLACE


@pytest.mark.parametrize("gives_back", [False, True])
def test_asking_for_a_grant_again_and_again_holds_it_no_longer_than_renewing(world, source, gives_back):
    settings = world.settings
    request = grant_of(world, source, source.publish("t1", IDS, TOKENS))
    for _ in range(int((settings.transfer.max_hold_s + 2 * settings.transfer.lease_s) / 10)):
        source.host.feed(ev.PeerRequest(b"stranger", request))
        if gives_back:
            returned = ReleaseGrant(request=2, grant=request.grant)
            source.host.feed(ev.PeerRequest(b"stranger", returned))
        world.advance(10)
    world.advance(settings.transfer.lease_s)
    assert [m.why for m in source.received(wk.Released)] == [Code.LEASE_EXPIRED]


# --- peers come and go


def forgotten(world: World, host: Host) -> list[str]:
    """Advance in steps and collect which connections the host closes."""
    found = []
    for _ in range(80):
        world.advance(10)
        found += world.forgotten.pop(host.name, [])
    return found


def test_a_peer_that_nothing_is_asked_of_any_more_is_forgotten(world, source, sink):
    assert delivers(source, sink, "t1")
    assert len(sink.host.node.snapshot().peers) == 1
    assert forgotten(world, sink.host) == [source.host.endpoint]
    assert not sink.host.node.snapshot().peers


def test_a_connection_that_a_late_question_opens_again_is_closed_again(world, source, sink):
    """Two questions to a peer that is dead: the first one's end closes, the second one's resend opens."""
    ref = source.publish("t1", IDS, TOKENS)
    assert sink.reads(ref)
    del world.hosts["p"]
    sink.say(wk.Abandon(ref=ref))  # asked for minutes
    sink.pull(ref, SINK_IDS, TOKENS)
    assert len(forgotten(world, sink.host)) >= 2
    assert len(sink.host.node.peer_requests) == 0


def test_engines_of_one_peer_whose_ids_never_come_back_are_forgotten(world, sink):
    host = world.host("p")
    for number in range(MAX_ENGINES_PER_PEER + 5):
        source = world.engine(host, f"prefill-{number}")[0]
        assert delivers(source, sink)
        source.close()
    (peer,) = sink.host.node.snapshot().peers
    assert len(peer.engines) == MAX_ENGINES_PER_PEER


# --- checked elsewhere


def test_a_layout_that_was_checked_by_the_shell_is_not_checked_again(world, stages, monkeypatch):
    """The thread takes 25 us a tensor for it; the loop has no time for that."""
    request = joining(world, stages[1])
    manifest = request.manifest
    layout = msgspec.structs.replace(
        manifest.layout, tensors=tuple(reversed(manifest.layout.tensors))
    )  # another one, as far as digests go
    request = msgspec.structs.replace(request, manifest=msgspec.structs.replace(manifest, layout=layout))
    found = checked_layouts((request.manifest,), LayoutCache())
    stages[0].host.feed(ev.LayoutsChecked(found))
    monkeypatch.setattr(
        "kvxferd.core.peers.manifest_checks.validate_layout", lambda *args: pytest.fail("checked again")
    )
    (done,) = world.send_request(stages[0].host, request)
    assert isinstance(done, RequestDone)


def test_who_may_not_join_is_refused_before_a_layout_is_looked_at(world, stages, monkeypatch):
    monkeypatch.setattr(core_home, "check_manifest", lambda *args: pytest.fail("looked at"))
    request = msgspec.structs.replace(joining(world, stages[1]), secret="another")
    (refused,) = world.send_request(stages[0].host, request)
    assert refused.code is Code.NOT_ALLOWED
    outline = PEER_OUTLINES.decode(encode(request))
    assert stages[0].host.node.refusal_of_join(b"evil", outline, "").code is Code.NOT_ALLOWED


def test_a_peer_that_cannot_be_connected_fails_its_pulls_with_the_reason(world, source, sink):
    ref = source.publish("t1", IDS, TOKENS)
    world.hold_network = True
    ticket = sink.pull(ref, SINK_IDS, TOKENS, deadline_s=60)
    world.network.clear()
    sink.host.feed(ev.PeerUnreachable(source.host.endpoint, "no name server answered"))
    failed = sink.ended(ticket)
    assert failed.code is Code.PEER_UNREACHABLE
    assert "no name server answered" in failed.message
    assert not sink.host.node.snapshot().peers


# --- grants, among peers that prove a key


@pytest.fixture
def granted(world, source):
    """A grant of the key 0a; its transfer."""
    ref = source.publish("t1", IDS, TOKENS, num_readers=2)
    source.host.feed(ev.PeerRequest(b"reader", grant_of(world, source, ref), "0a"))
    (mover,) = source.host.movers.values()
    source.host.feed(ev.MoverMessage(mover.mover, mv.Polling(token=0)))
    (transfer,) = source.host.node.published.table.live.values()
    assert len(transfer.grants) == 1
    return ref, transfer


def test_a_grant_is_its_keys_whatever_another_names(world, source, granted):
    _, transfer = granted
    (done,) = world.send_request(source.host, ReleaseGrant(request=1, grant="g"), key="0b")
    assert isinstance(done, RequestDone)
    (renewed,) = world.send_request(source.host, RenewGrants(request=1, grants=("g",)), key="0b")
    assert renewed.ended == ("g",)
    assert len(transfer.grants) == 1
    (renewed,) = world.send_request(source.host, RenewGrants(request=1, grants=("g",)), key="0a")
    assert not renewed.ended
    world.send_request(source.host, ReleaseGrant(request=1, grant="g"), key="0a")
    assert not transfer.grants


def test_a_question_that_waits_keeps_its_asker(world, source):
    """Another that uses its name waits beside it, and does not get its answer."""
    ref = TransferRef(source.host.endpoint, "prefill", "g1", "later", "00" * 16)
    request = grant_of(world, source, ref)
    assert not world.send_request(source.host, request, key="0a")
    assert not world.send_request(source.host, msgspec.structs.replace(request, request=6), key="0b")
    asks = source.host.node.waiting._requests.values()
    assert sorted(send_request.message.request for send_request in asks) == [5, 6]


def test_an_acknowledgement_ends_no_grant_of_another_transfer(world, source, granted):
    _, transfer = granted
    other = source.publish("t2", [4], 4)
    consumer = Consumer("decode", "g1", Rank(0, 0), 2)
    world.send_request(
        source.host, Acknowledge(request=1, grant="g", ref=other, consumer=consumer, bytes=0), key="0a"
    )
    assert len(transfer.grants) == 1


def test_made_up_readers_are_not_kept_without_end(world, source, granted):
    ref, transfer = granted
    for number in range(MAX_READERS + 10):
        consumer = Consumer(f"made-up-{number}", "g1", Rank(0, 0), 2)
        acknowledge = Acknowledge(request=1, grant="x", ref=ref, consumer=consumer, bytes=0)
        assert world.send_request(source.host, acknowledge, key="0b")
    assert len(transfer.readers) == MAX_READERS


def test_a_request_waits_with_the_names_that_it_is_counted_for(world, source):
    share = source.host.node.context.ledger[WAITING_BYTES]
    share.limit = 260_000
    ref = TransferRef(source.host.endpoint, "not-yet", "g1", "later", "00" * 16)
    long = ((Rank(0, 0), "a" * 200),) * 100

    def request(key: str, number: int, grant: str, reads: tuple[tuple[Rank, str], ...]) -> list[Code]:
        message = grant_of(world, source, ref, grant=grant)
        message = msgspec.structs.replace(message, request=number, reads=reads)
        replies = world.send_request(source.host, message, key=key)
        return [reply.code for reply in replies if isinstance(reply, PeerRefused)]

    assert not request("0b", 1, "g0", ())
    held = share.held
    assert not request("0b", 1, "g0", long)  # the same request, sent again: its first names count
    assert share.held == held
    assert [request("0b", 2, f"g{number}", long) for number in range(8)] == [[]] * 6 + [[Code.BUSY]] * 2
    assert not request("0b", 3, "g0", ())  # another one of that name: it takes the place of the first
    assert not request("0a", 2, "g0", ())
    for number in range(6):
        world.send_request(source.host, ReleaseGrant(request=4, grant=f"g{number}"), key="0b")
    world.send_request(source.host, ReleaseGrant(request=4, grant="g0"), key="0a")
    assert share.held == 0


def test_grants_are_bounded_on_one_transfer_and_in_all(world, source, granted, monkeypatch):
    monkeypatch.setattr(grant_server, "MAX_GRANTS_PER_TRANSFER", 4)
    ref, transfer = granted

    def requested(name: str, key: str) -> Message:
        return world.send_request(source.host, grant_of(world, source, ref, grant=name), key=key)[-1]

    assert isinstance(requested("g1", "0a"), GrantReply)
    with monkeypatch.context() as full:
        full.setattr(source.host.node.context.ledger[GRANTS], "limit", 2)
        assert requested("g2", "0a").code is Code.BUSY
    assert isinstance(requested("g1", "0a"), GrantReply)  # asked again: no more than before
    assert isinstance(requested("g", "0b"), GrantReply)
    assert isinstance(requested("g", "0c"), GrantReply)
    assert requested("g", "0d").code is Code.BUSY
    world.send_request(source.host, ReleaseGrant(request=1, grant="g1"), key="0a")
    assert isinstance(requested("g", "0d"), GrantReply)
    assert sorted(grant.peer_id for grant in transfer.grants.values()) == ["0a", "0b", "0c", "0d"]


def test_regions_in_more_pieces_than_a_rank_can_have_are_not_counted_one_by_one(world, stages, monkeypatch):
    """The limit was of each region: 1.3 million pieces of 40 regions took the loop a second."""
    monkeypatch.setattr(
        "kvxferd.core.peers.manifest_checks._is_valid_region", lambda region: pytest.fail("counted")
    )
    request = joining(world, stages[1])
    binding = request.manifest.binding
    (region,) = binding.regions
    many = msgspec.structs.replace(region, pieces=((1, 1),) * 5000)
    layout = request.manifest.layout
    regions = tuple(RegionSpec(f"r{n}", region.size_bytes) for n in range(2))
    manifest = msgspec.structs.replace(
        request.manifest,
        layout=msgspec.structs.replace(layout, regions=(*layout.regions, *regions)),
        binding=msgspec.structs.replace(
            binding, regions=(many, *(msgspec.structs.replace(many, region=spec.region) for spec in regions))
        ),
    )
    with pytest.raises(EngineError, match="8192 pieces"):
        check_manifest(manifest, LayoutCache())


def test_an_agent_has_a_name(world, stages):
    manifest = joining(world, stages[1]).manifest
    nameless = msgspec.structs.replace(manifest.binding, agent="")
    with pytest.raises(EngineError, match="its agent has no name"):
        check_manifest(msgspec.structs.replace(manifest, binding=nameless), LayoutCache())


def test_metadata_of_joined_ranks_is_bounded_by_peer(world, stages):
    """4,096 ranks with 2 MiB of metadata each were 8 GiB."""
    home, refused = stages[0].host, []
    home.node.home._member_share.limit = 11 << 20  # each counts twice, also as readers get it
    for number in range(3):
        said = joining(world, stages[1], engine_id=f"new-{number}")
        metadata = {"agent": f"agent-{number}", "metadata": bytes(2 << 20)}
        binding = msgspec.structs.replace(said.manifest.binding, **metadata)
        said = msgspec.structs.replace(said, manifest=msgspec.structs.replace(said.manifest, binding=binding))
        refused += [m for m in world.send_request(home, said) if isinstance(m, PeerRefused)]
    assert [m.code for m in refused] == [Code.BUSY]
