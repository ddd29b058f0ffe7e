"""Target: a node hears what a node once heard, with fields changed, messages lost, doubled and moved."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from kvxferd.core import Node
from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.errors import ProtocolError
from kvxferd.wire.codec import CLIENT_MESSAGES, FROM_MOVER, PEER_MESSAGES, Decoder, encode
from kvxferd.wire.limits import MAX_FRAME_BYTES
from tests.property.fuzz.draw import Draw
from tests.property.fuzz.recorded_sessions import SETTINGS, Tape, tapes
from tests.support.sim.node import LIBRARY

MAX_EFFECTS = 10_000  # of one event: a message never sets off more than the node has transfers and ranks
MAX_TICKS = 20_000
BODIES: dict[type, Decoder[Any]] = {
    ev.WorkerMessage: CLIENT_MESSAGES,
    ev.MoverMessage: FROM_MOVER,
    ev.PeerReply: PEER_MESSAGES,
    ev.PeerRequest: PEER_MESSAGES,
}


class Replay:
    """One node, fed from a tape."""

    def __init__(self, tape: Tape) -> None:
        tokens = itertools.chain(tape.tokens, (f"{n:032x}" for n in itertools.count()))
        self.node = Node(
            boot=tape.boot, endpoint=tape.endpoint, settings=SETTINGS, new_token=lambda: next(tokens)
        )
        self.node.feed(ev.ForkserverReady(LIBRARY), 0.0)
        self.now = 0.0
        self.sessions: set[int] = set()
        self.movers: set[int] = set()

    def feed(self, event: ev.Event) -> None:
        """Feed one event, as a shell would: never what it could not have heard."""
        match event:
            case ev.WorkerConnected():
                if event.session in self.sessions:
                    return  # the shell never gives a number twice
                self.sessions.add(event.session)
        effects = self.node.feed(event, self.now)
        assert len(effects) < MAX_EFFECTS
        self.node.check_integrity()
        for effect in effects:
            if isinstance(effect, fx.ForkMover):
                self.movers.add(effect.mover)
            if isinstance(effect, fx.SendToWorker | fx.SendToMover | fx.BindMover):
                assert len(encode(effect.message)) <= MAX_FRAME_BYTES

    def end(self) -> None:
        """Everybody goes and nobody answers; what the node still remembers is too much."""
        self.node.snapshot()
        for session in self.sessions:
            self.feed(ev.WorkerDisconnected(session))
        for mover in self.movers:
            self.feed(ev.MoverDied(mover))
        for _ in range(MAX_TICKS):
            deadline = self.node.next_deadline()
            if deadline is None:
                break
            self.now = max(self.now, deadline)
            self.feed(ev.Tick())
        else:
            raise AssertionError("its timers never end")
        left = self.left()
        assert not left, left

    def left(self) -> list[str]:
        node = self.node
        found = {
            "sessions": node.sessions,
            "engines": list(node.registry),
            "movers": node.movers._movers,
            "peers": node.peers._peers,
            "members": node.home._members,
            "fence pages": node.fence_pages._pages,
            "pulls": node.pulls,
            "questions": node.peer_requests,
            "transfers": node.published.table.live,
            "tombstones": node.published.ended,
            "grants": node.published.table.by_grant,
            "waiting requests": node.waiting,
            "early ready": list(node.published.announced),
            "polling": node.poll_requests._states,
            "waiting for polling": [r for r in node.registry.local_ranks() if r.polling_request],
            "holds": node.grant_client.num_grants(),
        }
        return [f"{len(entries)} {name}" for name, entries in found.items() if len(entries)]


def try_session(source: bytes) -> None:
    """Whatever a node hears, it never raises, its books agree, and in the end nothing is left."""
    draw = Draw(source)
    tape = draw.pick(tapes())
    replay = Replay(tape)
    received = list(tape.received)
    at = 0
    while at < len(received):
        event, when = received[at]
        at += 1
        replay.now = max(replay.now, when)
        fate = 0 if draw.is_over else draw.below(32)
        if fate < 22:
            replay.feed(event)
        elif fate < 28:
            _feed_mutated(replay, draw, event)
        elif fate == 28:
            for _ in range(2):
                replay.feed(event)
        elif fate == 29:
            pass
        elif fate == 30:
            replay.feed(received[draw.below(len(received))][0])
            at -= draw.below(2)
        else:
            replay.now += draw.pick([0.0, 0.01, 0.5, 2.0, 31.0, 700.0])
    replay.end()


def _feed_mutated(replay: Replay, draw: Draw, event: ev.Event) -> None:
    """The event with its message changed in one to three places, if the decoder takes it at all."""
    decoder = BODIES.get(type(event))
    if decoder is None:
        replay.feed(event)
        return
    assert isinstance(event, ev.WorkerMessage | ev.MoverMessage | ev.PeerReply | ev.PeerRequest)
    tree = msgspec.msgpack.decode(encode(event.message))
    for _ in range(1 + draw.below(3)):
        tree = draw.mutated(tree)
    try:
        message = decoder.decode(msgspec.msgpack.encode(tree))
    except (ProtocolError, OverflowError):  # what msgpack cannot say never comes over a wire
        return
    match event:
        case ev.WorkerMessage():
            replay.feed(ev.WorkerMessage(event.session, message, event.problem, event.fence_word))
        case ev.MoverMessage():
            replay.feed(ev.MoverMessage(event.mover, message))
        case ev.PeerReply():
            replay.feed(ev.PeerReply(event.endpoint, message))
        case ev.PeerRequest():
            replay.feed(ev.PeerRequest(event.route, message))
