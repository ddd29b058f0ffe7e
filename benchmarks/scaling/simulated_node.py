"""One simulated node: the core is real, its workers, movers and clock are simulated, its cost is counted."""

from __future__ import annotations

import heapq
import itertools
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable

from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.core.node import Node
from kvxferd.core.settings import Settings
from kvxferd.ids import (
    AgentName,
    BootId,
    Endpoint,
    EngineKey,
    GroupName,
    Incarnation,
    MoverId,
    SessionId,
    Ticket,
    TransferId,
)
from kvxferd.layout import EngineSpec, PackedBlocks, RankLayout
from kvxferd.wire import mover as mv
from kvxferd.wire import worker as wk
from kvxferd.wire.common import Message, TransferRef
from kvxferd.wire.limits import FENCE_SLOTS
from scaling.engines import binding

FENCE_WORD = bytes(range(16))
INCARNATION = Incarnation("first")


class Clock:
    """Simulated time: the scheduled calls, in order."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Schedule a call `delay_s` from now."""
        heapq.heappush(self._queue, (self.now + delay_s, next(self._order), act))

    def run(self, seconds: float) -> None:
        """Advance the clock by `seconds`, with every call that is due."""
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, act = heapq.heappop(self._queue)
            act()
        self.now = end


class Cost:
    """CPU time of a core, by the kind of event that it was fed."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, kind: str, seconds: float) -> None:
        """Count one event."""
        self.events[kind] += 1
        self.seconds[kind] += seconds

    @property
    def total_s(self) -> float:
        """The cost of all events."""
        return sum(self.seconds.values())


Send = Callable[["SimulatedNode", Message, Endpoint | bytes], None]
Meter = Callable[[], float]  # the cost so far: seconds, or any other quantity that adds up


class SimulatedNode:
    """A node. `send` gets its messages to other nodes: to an endpoint, or back along a route."""

    def __init__(
        self,
        name: str,
        clock: Clock,
        send: Send,
        settings: Settings,
        wire_s: float,
        meter: Meter = time.thread_time,
    ) -> None:
        self.name = name
        self.endpoint = Endpoint(f"tcp://{name}:9441")
        self.core = Node(
            boot=BootId(name),
            endpoint=self.endpoint,
            settings=settings,
            new_token=lambda: secrets.token_hex(16),
        )
        self.cost = Cost()
        self.outcomes: Counter[str] = Counter()
        self._clock = clock
        self._send = send
        self._wire_s = wire_s
        self._meter = meter
        self._numbers = itertools.count(1)
        self._specs: dict[SessionId, EngineSpec] = {}
        self._layouts: dict[SessionId, RankLayout] = {}
        self._slots: dict[SessionId, list[int]] = {}
        self._slot_of: dict[tuple[SessionId, TransferId], int] = {}
        self._tick_at = float("inf")

    # --- its workers

    def register(self, spec: EngineSpec, layout: RankLayout) -> SessionId:
        """Have a rank connect and register."""
        session = SessionId(next(self._numbers))
        self._specs[session], self._layouts[session] = spec, layout
        self._slots[session] = list(range(FENCE_SLOTS))
        self.feed(ev.WorkerConnected(session, 1, 0))
        self.send_as_worker(session, wk.Hello(versions=wk.WORKER_VERSIONS, client="simulated"))
        regions = tuple(wk.RegionExport(r.region, r.size_bytes, n) for n, r in enumerate(layout.regions))
        register = wk.Register(
            request=1, engine=spec, layout=layout, regions=regions, incarnation=INCARNATION
        )
        self.send_as_worker(session, register)
        return session

    def send_as_worker(self, session: SessionId, message: wk.ClientMessage) -> None:
        """Feed the core a message of a worker."""
        word = FENCE_WORD if isinstance(message, wk.Publish) else b""
        self.feed(ev.WorkerMessage(session, message, fence_word=word))

    def publish(
        self, session: SessionId, name: str, blocks: dict[GroupName, PackedBlocks], num_tokens: int
    ) -> TransferRef:
        """Publish a transfer with a free fence slot."""
        spec, transfer = self._specs[session], TransferId(name)
        slot = self._slot_of[session, transfer] = self._slots[session].pop()
        nonce = secrets.token_hex(16)
        self.send_as_worker(
            session,
            wk.Publish(
                transfer_id=transfer,
                nonce=nonce,
                blocks=blocks,
                num_tokens=num_tokens,
                fence_slot=slot,
                incarnations=((spec.rank, INCARNATION),),
            ),
        )
        return TransferRef(self.endpoint, spec.engine_id, spec.generation, transfer, nonce)

    def ready(self, session: SessionId, ref: TransferRef) -> None:
        """Report that a rank has written a transfer."""
        self.send_as_worker(session, wk.Ready(transfer_id=ref.transfer_id, incarnation=INCARNATION))

    def pull(
        self,
        session: SessionId,
        ref: TransferRef,
        blocks: dict[GroupName, PackedBlocks],
        num_tokens: int,
    ) -> None:
        """Pull a transfer into a rank."""
        ticket = Ticket(next(self._numbers))
        self.send_as_worker(
            session,
            wk.PullRequest(ticket=ticket, ref=ref, blocks=blocks, num_tokens=num_tokens, deadline_s=30.0),
        )

    def key_of(self, session: SessionId) -> EngineKey:
        """Return the key of a rank's engine."""
        return self._specs[session].key

    # --- the core

    def feed(self, event: ev.Event) -> None:
        """Feed the core an event, count its cost, and apply the effects."""
        began = self._meter()
        effects = self.core.feed(event, self._clock.now)
        spent = self._meter() - began
        said = getattr(event, "message", event)
        self.cost.add(type(said).__name__, spent)
        for effect in effects:
            self._apply_effect(effect)
        deadline = self.core.next_deadline()
        if deadline is not None and deadline < self._tick_at:
            self._tick_at = deadline
            self._clock.after(max(0.0, deadline - self._clock.now), lambda: self._tick(deadline))

    def _tick(self, at: float) -> None:
        if at == self._tick_at:
            self._tick_at = float("inf")
            self.feed(ev.Tick())

    def _later(self, event: ev.Event, delay_s: float = 0.0) -> None:
        self._clock.after(delay_s, lambda: self.feed(event))

    def _apply_effect(self, effect: fx.Effect) -> None:
        match effect:
            case fx.SendToPeer():
                self._send(self, effect.message, effect.endpoint)
            case fx.ReplyToPeer():
                self._send(self, effect.message, effect.route)
            case fx.SendToWorker():
                self._handle_worker_message(effect.session, effect.message)
            case fx.RequestMover():
                agent = binding(
                    self._specs[effect.session].engine_id,
                    self._specs[effect.session].rank,
                    self._layouts[effect.session],
                ).agent
                mover = MoverId(int(effect.session))
                self._later(
                    ev.MoverAssigned(effect.session, mover, AgentName(f"{self.name}/{agent}"), "simulated")
                )
            case fx.BindMover():
                spec, layout = self._specs[effect.session], self._layouts[effect.session]
                bound = binding(spec.engine_id, spec.rank, layout)
                self._later(
                    ev.MoverMessage(effect.mover, mv.Bound(regions=bound.regions, metadata=bound.metadata))
                )
            case fx.ShareFencePage():
                said = mv.FenceMapped(session=effect.session, address=1 << 41, metadata=bytes(400))
                self._later(ev.MoverMessage(effect.mover, said))
            case fx.SendToMover():
                self._handle_mover_message(effect.mover, effect.message)
            case _:
                pass  # descriptors, fence words and records are not simulated

    def _handle_worker_message(self, session: SessionId, message: Message) -> None:
        self.outcomes[type(message).__name__] += 1
        if isinstance(message, wk.MoverOffered):
            self._later(ev.WorkerMessage(session, wk.MoverAcknowledged(number=message.number)))
        if isinstance(message, wk.Released) and (session, message.transfer_id) in self._slot_of:
            self._slots[session].append(self._slot_of.pop((session, message.transfer_id)))

    def _handle_mover_message(self, mover: MoverId, message: Message) -> None:
        if isinstance(message, mv.SetPolling) and message.on:
            self._later(ev.MoverMessage(mover, mv.Polling(token=message.token)))
        elif isinstance(message, mv.StartPull):
            outcome = mv.PullOutcome(delivered=True, bytes=1 << 20, runs=64)
            self._later(ev.MoverMessage(mover, mv.PullDone(pull=message.pull, outcome=outcome)), self._wire_s)
