"""What a peer and a pull are shown as: each state that is documented is reached, and left again."""

from __future__ import annotations

from kvxferd.core.peers.peers import HELLO_RESENDS
from kvxferd.core.ranks.rank import RankState
from kvxferd.errors import Code
from kvxferd.records import PULL_STATES, RELEASE_REASONS
from kvxferd.telemetry.gauges import PEER_STATES, RANK_STATES
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import PEER_MESSAGES
from kvxferd.wire.common import TransferRef
from tests.support.node_samples import LIMIT_NAMES
from tests.support.simulation import IDS, SINK_IDS, TOKENS, World


def states_of(world: World, name: str = "d") -> dict[str, str]:
    return {peer.endpoint: peer.state for peer in world.hosts[name].node.snapshot().peers}


def test_a_peer_that_does_not_answer_the_greeting_is_silent() -> None:
    world = World()
    [sink] = world.engine(world.host("d"), "decode")
    nobody = "tcp://nobody:9441"
    sink.pull(TransferRef(nobody, "prefill", "g1", "t", "n"), SINK_IDS, TOKENS)
    assert states_of(world) == {nobody: "connecting"}
    world.advance(HELLO_RESENDS * world.settings.resend_s + 0.1)
    assert states_of(world) == {nobody: "silent"}
    assert set(states_of(world).values()) <= set(PEER_STATES)


def test_a_peer_that_was_up_is_silent_once_its_reply_is_overdue_and_up_when_it_comes() -> None:
    world = World()
    source_host = world.host("p")
    [source], [sink] = world.engine(source_host, "prefill"), world.engine(world.host("d"), "decode")
    ref = source.publish("t1", IDS, TOKENS)
    assert sink.reads(ref)
    assert states_of(world) == {source_host.endpoint: "up"}
    world.cut.add(("d", "p"))
    sink.pull(source.publish("t2", IDS, TOKENS), SINK_IDS, TOKENS)
    assert states_of(world) == {source_host.endpoint: "up"}
    world.advance(max(world.settings.silent_after_s, world.settings.handshake_wait_s) + 1.0)
    assert states_of(world) == {source_host.endpoint: "silent"}
    world.cut.clear()
    world.advance(world.settings.resend_s + 0.1)
    assert states_of(world) == {source_host.endpoint: "up"}


def test_a_waiting_pull_is_in_a_state_that_is_documented() -> None:
    world = World()
    [sink] = world.engine(world.host("d"), "decode")
    sink.pull(TransferRef("tcp://nobody:9441", "prefill", "g1", "t", "n"), SINK_IDS, TOKENS)
    phases = world.hosts["d"].node.snapshot().pull_phases
    assert phases == {"handshake": 1}
    assert phases.keys() <= set(PULL_STATES)


def test_states_and_reasons_are_those_of_the_core() -> None:
    assert {*RankState, "remote"} - {RankState.GONE} == set(RANK_STATES)
    assert set(RELEASE_REASONS) < set(Code)


def test_limits_and_what_is_published_follow_the_node() -> None:
    world = World()
    [source], [sink] = world.engine(world.host("p"), "prefill"), world.engine(world.host("d"), "decode")
    node = world.hosts["p"].node

    def used() -> dict[str, int]:
        return {one.name: one.used for one in node.snapshot().limits}

    assert tuple(used()) == LIMIT_NAMES
    assert (used()["max_ranks"], used()["max_transfers_per_engine"]) == (1, 0)
    ref = source.publish("t1", IDS, TOKENS)
    world.advance(2.0)
    shown = node.snapshot()
    assert used()["max_transfers_per_engine"] == 1
    assert used()["block_id_bytes"] > 0
    assert shown.published_bytes == node.registry.get(ref.engine).ranks[source.spec.rank].bytes_of(  # type: ignore[union-attr]
        node.published.table.live[ref.engine, ref.transfer_id].blocks
    )
    assert shown.oldest_published_s >= 2.0
    assert sink.reads(ref)
    shown = node.snapshot()
    assert shown.published_bytes == shown.oldest_published_s == used()["max_transfers_per_engine"] == 0
    [served] = world.hosts["p"].served
    assert (served.source, served.sink, served.peer) == ("prefill", "decode", sink.host.endpoint)
    assert served.bytes == sink.received(wk.TicketDelivered)[0].bytes


def test_a_first_pull_has_two_round_trips() -> None:
    """The hello goes with the question for the manifest, the grant's request comes behind: nothing else."""
    world = World()
    [source], [sink] = world.engine(world.host("p"), "prefill"), world.engine(world.host("d"), "decode")
    ref = source.publish("t1", IDS, TOKENS)
    world.hold_network = True
    ticket, trips = sink.pull(ref, SINK_IDS, TOKENS), []
    while world.network and sink.ended(ticket) is None:
        trips.append([type(PEER_MESSAGES.decode(sent.payload)).__name__ for sent in world.network])
        for _ in trips[-1]:
            world.arrive(world.network.popleft())
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)
    assert trips == [
        ["PeerHello", "ManifestRequest"],
        ["PeerWelcome", "ManifestReply"],
        ["GrantRequest"],
        ["GrantReply"],
    ]


def test_to_a_silent_peer_only_a_hello_is_sent_and_all_that_waits_as_soon_as_it_is_back() -> None:
    world = World()
    [source], [sink] = world.engine(world.host("p"), "prefill"), world.engine(world.host("d"), "decode")
    assert sink.reads(source.publish("t0", IDS, TOKENS))
    world.cut.add(("d", "p"))
    sink.say(wk.Abandon(ref=source.publish("t1", IDS, TOKENS)))
    ticket = sink.pull(source.publish("t2", IDS, TOKENS), SINK_IDS, TOKENS, deadline_s=300.0)
    world.advance(world.settings.gone_after_s + 0.1)
    assert sink.ended(ticket).code is Code.PEER_UNREACHABLE
    sent: list[str] = []
    post = world.post
    world.post = lambda *args: [sent.append(type(args[-1]).__name__), post(*args)]  # type: ignore[method-assign]
    ticket = sink.pull(source.publish("t3", IDS, TOKENS), SINK_IDS, TOKENS, deadline_s=300.0)
    world.advance(3 * world.settings.resend_s)
    assert set(sent) == {"PeerHello"}
    world.cut.clear()
    world.advance(world.settings.resend_s + 0.1)
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)
    assert "AbandonTransfer" in sent
