"""Nodes whose cores are real and whose cost is counted. Workers and movers hold and read no memory."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable

from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.core.settings import Settings
from kvxferd.wire import mover as mv
from kvxferd.wire.common import Message, RankIncarnations
from scaling.engines import binding
from tests.support.simulation import Host, Mover, Worker, World

FENCE_METADATA = bytes(400)
WIRE_S = 0.05  # that each read takes

Meter = Callable[[], float]  # the cost so far: seconds, or any other quantity that adds up


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


class MeteredHost(Host):
    """A node whose core's cost is counted, and what its workers are sent."""

    def __init__(self, world: MeteredWorld, name: str) -> None:
        super().__init__(world, name)
        self.integrity_every = 0
        self.cost = Cost()
        self.outcomes: Counter[str] = Counter()
        self.records = self.served = deque(maxlen=0)
        self._meter = world.meter

    def decide(self, event: ev.Event) -> list[fx.Effect]:
        """Feed the core, and count the cost."""
        now = self.now()
        began = self._meter()
        effects = self.node.feed(event, now)
        spent = self._meter() - began
        self.cost.add(type(getattr(event, "message", event)).__name__, spent)
        return effects


class CountingWorker(Worker):
    """A rank without memory."""

    host: MeteredHost

    @property
    def known(self) -> RankIncarnations:
        """The rank itself."""
        return ((self.spec.rank, self.incarnation),)

    def allocate(self) -> None:
        """Need no memory: nothing is read."""

    def receive(self, effect: fx.SendToWorker) -> None:
        """Count a frame, and keep none."""
        super().receive(effect)
        self.inbox.clear()
        self.host.outcomes[type(effect.message).__name__] += 1


class InstantMover(Mover):
    """A mover that reads nothing: each pull is delivered after `WIRE_S`."""

    def hear(self, message: Message) -> None:
        """Reply to a message of the daemon."""
        match message:
            case mv.Bind():
                spec = self.worker.spec
                bound = binding(spec.engine_id, spec.rank, self.worker.layout)
                self.say(mv.Bound(regions=bound.regions, metadata=bound.metadata))
            case mv.MapFence():
                session = message.session
                self.say(mv.FenceMapped(session=session, address=1 << 41, metadata=FENCE_METADATA))
            case mv.SetPolling():
                super().hear(message)
            case mv.StartPull():
                outcome = mv.PullOutcome(delivered=True, bytes=1 << 20, runs=64)
                done = mv.PullDone(pull=message.pull, outcome=outcome)
                self.world.schedule.after(WIRE_S, self.say, done)


class MeteredWorld(World):
    """The nodes, and what joins them: a subclass posts messages."""

    host_type, worker_type, mover_type = MeteredHost, CountingWorker, InstantMover
    hosts: dict[str, MeteredHost]

    def __init__(self, settings: Settings | None = None, meter: Meter = time.thread_time) -> None:
        super().__init__(settings=settings)
        self.meter = meter
