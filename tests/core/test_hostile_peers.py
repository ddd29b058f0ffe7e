"""What another daemon may say, by mistake or on purpose, without harm to anybody but itself."""

from __future__ import annotations

import msgspec
import pytest
from world import Host, Worker, World

from kvxferd.core import events as ev
from kvxferd.errors import Code
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.common import Message
from kvxferd.wire.peer import (
    Granted,
)

IDS, SINK_IDS, TOKENS = [3, 1, 2], [7, 9, 4], 11


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def source(world) -> Worker:
    return world.engine(world.host("p"), "prefill")[0]


@pytest.fixture
def sink(world) -> Worker:
    return world.engine(world.host("d"), "decode")[0]


def tamper(world: World, kind: type[Message], **changes: object) -> None:
    """Change the next message of a kind that is under way, and let everything arrive."""
    while world.network:
        envelope = world.network.popleft()
        message = PEER_MESSAGES.decode(envelope.payload)
        if isinstance(message, kind):
            envelope.payload = encode(msgspec.structs.replace(message, **changes))
        world.arrive(envelope)


def ask(world: World, host: Host, question: Message, route: bytes = b"stranger") -> list[Message]:
    """Ask as a bare peer; return what came back at once."""
    effects = host.node.feed(ev.RouteSaid(route, question), world.now)
    host.node.check_integrity()
    return [effect.message for effect in effects if getattr(effect, "route", None) == route]


@pytest.mark.parametrize(
    "nonsense",
    [
        {"lease_s": 0.0},
        {"lease_s": -1.0},
        {"lease_s": float("nan")},
        {"lease_s": float("inf")},
        {"fence_word": b""},
        {"fence_address": -1},
        {"fence_address": 2**64 - 1},
        {"fence_agent": "x" * 300},
        {"fence_metadata": bytes(2 << 20)},
    ],
)
def test_a_grant_that_makes_no_sense_fails_its_pull_and_nothing_else(world, source, sink, nonsense):
    world.hold_network = True
    ticket = sink.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS)
    tamper(world, Granted, **nonsense)
    assert sink.ended(ticket).code is Code.BAD_FRAME
    assert sink.ended(ticket).safe_to_reuse
    world.hold_network = False
    good = sink.pull(source.publish("t2", IDS, TOKENS), SINK_IDS, TOKENS)
    assert isinstance(sink.ended(good), wk.Delivered)
    world.advance(100)
    assert source.host.node.is_idle
