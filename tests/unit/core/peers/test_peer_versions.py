"""Two daemons that share no version of the protocol refuse each other, and say what to do."""

from __future__ import annotations

import msgspec
import pytest

from kvxferd.core.peers.routes import MAX_ROUTES, PeerRoutes
from kvxferd.errors import Code
from kvxferd.ids import Endpoint
from kvxferd.wire import peer
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.common import Versions
from tests.support.simulation import IDS, SINK_IDS, TOKENS, Envelope, World

OTHER = peer.PEER_VERSIONS.newest + 1


class OtherVersions(World):
    """The host "d" offers another version, or the host "p" chooses one."""

    def __init__(self, is_chosen: bool) -> None:
        super().__init__()
        self.is_chosen = is_chosen
        self.num_answered = 0  # requests that were sent behind the hello

    def arrive(self, envelope: Envelope) -> None:
        message = PEER_MESSAGES.decode(envelope.payload)
        match message:
            case peer.PeerHello() if not self.is_chosen:
                message = msgspec.structs.replace(message, versions=Versions(OTHER, OTHER))
            case peer.PeerWelcome() if self.is_chosen:
                message = msgspec.structs.replace(message, version=OTHER)
            case peer.ManifestReply() | peer.GrantReply():
                self.num_answered += 1
        envelope.payload = encode(message)
        super().arrive(envelope)


@pytest.mark.parametrize("is_chosen", [False, True])
def test_a_pull_from_a_peer_that_shares_no_version_fails_with_the_reason(is_chosen: bool) -> None:
    world = OtherVersions(is_chosen)
    (source,), (sink,) = world.engine(world.host("p"), "prefill"), world.engine(world.host("d"), "decode")
    failed = sink.ended(sink.pull(source.publish("t", IDS, TOKENS), SINK_IDS, TOKENS))
    assert isinstance(failed, wk.TicketFailed)
    assert (failed.code, failed.safe_to_reuse) == (Code.BAD_VERSION, True)
    assert f"version {OTHER}" in failed.message
    assert f"this one speaks {peer.PEER_VERSIONS}; upgrade the older" in failed.message
    assert bool(world.num_answered) is is_chosen  # who refuses a hello handles nothing that comes behind it


def test_routes_are_bounded_and_those_in_use_stay() -> None:
    routes = PeerRoutes()
    routes.set_endpoint(b"used", Endpoint("tcp://used:1"))
    for number in range(MAX_ROUTES + 10):
        routes.set_endpoint(number.to_bytes(4, "little"), Endpoint("tcp://other:1"))
        assert routes.endpoint_of(b"used") == "tcp://used:1"
    assert len(routes._endpoints) == MAX_ROUTES
    assert routes.endpoint_of(b"never greeted") == ""
