"""All that there is in an episode: nodes, engines, the network, and who asks whom."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from kvxferd.config import LimitsConfig
from kvxferd.core import Settings
from kvxferd.ids import AgentName
from kvxferd.wire.limits import CHUNK_BYTES, IDS_PART_BYTES
from kvxferd.wire.mover import ReadWay
from tests.property.simulation.agenda import Agenda
from tests.property.simulation.daemon import Daemon
from tests.property.simulation.engine import Engine, EngineShape, Transfer
from tests.property.simulation.mover import Mover
from tests.property.simulation.network import Network
from tests.property.simulation.oracle import Oracle, Pull
from tests.property.simulation.transport import Fabric
from tests.property.simulation.watcher import Watcher

SETTINGS = Settings(
    lease_s=6.0,
    max_lease_s=60.0,
    max_hold_s=20.0,
    handshake_wait_s=4.0,
    resend_s=1.0,
    silent_after_s=4.0,
    tombstone_s=30.0,
    acknowledge_for_s=20.0,
    quiesce_s=2.0,
    ownership_s=60.0,
)


@dataclass(frozen=True)
class Traits:
    """What an episode has besides its faults."""

    transport: str = "cma"
    read_ways: Mapping[str, ReadWay] = field(default_factory=dict)  # of each node's movers
    num_chunks: int = 64  # that a node's movers may have for covering reads
    has_low_limits: bool = False
    has_short_leases: bool = False  # which end while reads are under way: all are slow
    part_bytes: int = IDS_PART_BYTES  # of block ids in a message: few, so that most requests need parts
    drifts: bool = False  # each node's clock has another rate and another start


LOW_LIMITS = LimitsConfig(max_pulls_per_rank=3, max_transfers_per_engine=3)


class Clock:
    """A node's clock."""

    def __init__(self, agenda: Agenda, rate: float = 1.0, start: float = 0.0) -> None:
        self._agenda = agenda
        self._rate = rate
        self._start = start

    def now(self) -> float:
        """Return the node's time."""
        return self._start + self._agenda.now * self._rate

    def when(self, time: float) -> float:
        """Return at which time of the episode the node's clock shows that time, or a moment after it."""
        return max(self._agenda.now, (time - self._start) / self._rate + 1e-6)

    def jump(self, seconds: float) -> None:
        """Show a later time from now on."""
        self._start += seconds


class World:
    """See the module."""

    def __init__(
        self,
        agenda: Agenda,
        traits: Traits,
        node_names: list[str],
        shapes: list[EngineShape],
        integrity_every: int = 1,
    ) -> None:
        self.agenda = agenda
        self.traits = traits
        self._settings = SETTINGS
        if traits.has_low_limits:
            self._settings = replace(self._settings, limits=LOW_LIMITS)
        limits = msgspec.structs.replace(self._settings.limits, staging_bytes=traits.num_chunks * CHUNK_BYTES)
        self._settings = replace(self._settings, limits=limits)
        if traits.has_short_leases:
            self._settings = replace(self._settings, lease_s=0.4, max_hold_s=0.2)
        rng = random.Random(agenda.rng.random())
        self.clocks = {
            name: Clock(agenda, rng.uniform(0.998, 1.002), rng.uniform(0.0, 1e6))
            if traits.drifts
            else Clock(agenda)
            for name in node_names
        }
        self.integrity_every = integrity_every  # events of a daemon
        self.watcher = Watcher()
        self.oracle = Oracle(agenda)
        fabric_rng = random.Random(agenda.rng.random())
        self.fabric = Fabric(agenda, traits.transport, fabric_rng, is_slow=traits.has_short_leases)
        self.fabric.on_write = self.oracle.on_write
        self.network = Network(self, random.Random(agenda.rng.random()))
        self.daemons: dict[str, Daemon] = {}
        self.transfer_of: dict[Pull, Transfer] = {}
        self.on_pull: Callable[[], None] = lambda: None
        self.planned_at_read: deque[tuple[float, Callable[[Mover], None]]] = deque()
        self._saved: dict[str, tuple] = dict.fromkeys(node_names, ())
        self._eras = dict.fromkeys(node_names, 0)
        self._last_number = 0
        self.node_names = node_names
        for name in node_names:
            self.start_daemon(name)
        self.engines = [Engine(self, shape) for shape in shapes]
        for engine in self.engines:
            engine.start()

    @property
    def lease_s(self) -> float:
        """The default lease."""
        return self._settings.lease_s

    def watch(self, watcher: Watcher) -> None:
        """Tell the watcher what happens from now on."""
        self.watcher = watcher
        for daemon in self.daemons.values():
            watcher.daemon_started(daemon)

    def take_number(self) -> int:
        """Return a number that no transfer had before."""
        self._last_number += 1
        return self._last_number

    def pull_started(self) -> None:
        """A rank has called `pull`."""
        self.on_pull()

    def mover_of(self, agent: AgentName) -> Mover | None:
        """Return the mover with that name, if a daemon has it."""
        movers = [mover for daemon in self.daemons.values() for mover in daemon.movers.values()]
        return next((mover for mover in movers if mover.agent == agent), None)

    def forget_plans(self) -> None:
        """Have no fault happen any more that waits for something, and end those that take long."""
        self.network.forget_plans()
        self.planned_at_read.clear()
        for mover in [mover for daemon in self.daemons.values() for mover in daemon.movers.values()]:
            mover.dies_at_delivery, mover.at_delivery = False, None
            mover.transport.num_to_refuse = 0
            if mover.is_stopped:
                mover.resume()

    def reads(self, mover: Mover) -> None:
        """A mover has posted a read."""
        if self.planned_at_read:
            delay_s, act = self.planned_at_read.popleft()
            self.agenda.after(delay_s, act, mover)

    # --- daemons

    def start_daemon(self, node_name: str) -> None:
        """Start a node's daemon, if there is none."""
        if node_name in self.daemons:
            return
        self._eras[node_name] += 1
        read_way = self.traits.read_ways.get(node_name, ReadWay.DIRECT)
        settings = replace(self._settings, read_way=read_way)
        daemon = Daemon(self, node_name, self._eras[node_name], settings)
        daemon.note("starts")
        self.daemons[node_name] = daemon
        self.watcher.daemon_started(daemon)
        daemon.start(self._saved[node_name])

    def kill_daemon(self, node_name: str) -> None:
        """Kill a node's daemon."""
        daemon = self.daemons.pop(node_name)
        self._saved[node_name] = daemon.saved
        daemon.die()

    def jump_clock(self, node_name: str, seconds: float) -> None:
        """Have a node's clock show a later time at once."""
        self.clocks[node_name].jump(seconds)
        if daemon := self.daemons.get(node_name):
            daemon.clock_jumped()
        for process in [p for engine in self.engines for p in engine.processes if p.node_name == node_name]:
            process.clock_jumped()

    # --- engines

    @property
    def sources(self) -> list[Engine]:
        """The engines that publish."""
        return [engine for engine in self.engines if engine.shape.is_source]

    @property
    def sinks(self) -> list[Engine]:
        """The engines that pull."""
        return [engine for engine in self.engines if not engine.shape.is_source]

    def is_ready(self) -> bool:
        """Whether every engine is registered."""
        return all(engine.is_ready for engine in self.engines)

    def leftovers(self) -> list[str]:
        """Return what a world at rest would not hold."""
        found = [line for daemon in self.daemons.values() for line in daemon.leftovers()]
        return found + [line for engine in self.engines for line in engine.leftovers()]
