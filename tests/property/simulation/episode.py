"""One episode: everything is built, faults strike under traffic, and all comes to rest."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from kvxferd.client import gpu_events
from kvxferd.core.sink import needs
from kvxferd.core.sink import stalled_sources as source_breaker
from kvxferd.errors import KvxferdError
from kvxferd.wire import block_id_parts
from kvxferd.wire.limits import IDS_PART_BYTES
from kvxferd.wire.mover import ReadWay
from tests.property.simulation.agenda import Agenda
from tests.property.simulation.engine import Engine, EngineShape, Transfer
from tests.property.simulation.faults import (
    MESSAGE_KINDS,
    OTHER_KINDS,
    Fault,
    Faults,
)
from tests.property.simulation.lost_node import LostNode
from tests.property.simulation.next_transfers import NUM_READERS, START_S, NextTransfers
from tests.property.simulation.oracle import Violation
from tests.property.simulation.world import Traits, World

REST_S = 90.0  # by then everything is at rest: longer than any lease, hold or quarantine
LOOK_S = 15.0  # so often it is looked whether it is: longer than any message is late
FULL_REST_SHARE = 0.2  # of the episodes: they wait whether anything comes back
LOST_NODE_SHARE = 0.25  # of the episodes: they end with a node that is gone
MESSAGE_SHARE = 0.42  # of the faults: messages lost, doubled or delayed
REFUSED_S = 10.0  # so long a source whose reads hang is refused
POLL_S = 0.004  # so often it is asked whether a GPU's work is done: less often than in use, for speed
READ_WAYS = (ReadWay.DIRECT, ReadWay.COVERING)
TRANSPORTS = ("cma", "cma", "tcp", "rdma")


@dataclass(frozen=True)
class Size:
    """How much there is in an episode."""

    nodes: int = 2
    engines: int = 4
    faults: int = 30


@dataclass
class Result:
    """What an episode came to."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0  # faults that struck while a pull was in flight
    steps: int = 0
    virtual_s: float = 0.0
    transfers: int = 0
    delivered: int = 0
    kind: str = ""  # of what is broken
    problem: str = ""
    num_wrong: int = 0
    digest: str = ""
    trace: list[str] = field(default_factory=list)


@contextmanager
def _limits(traits: Traits) -> Iterator[None]:
    """Have limits that a few tiny blocks reach, and sources that are refused for a short time."""
    limits = (
        (needs, "MIN_PIECE_BYTES", 1),
        (source_breaker, "REFUSED_S", REFUSED_S),
        (block_id_parts, "IDS_PART_BYTES", traits.part_bytes),
        (gpu_events, "POLL_S", POLL_S),
    )
    with ExitStack() as stack:
        for module, name, value in limits:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield


class Episode:
    """Draws everything from its seed.

    `faults`: instead of those that the seed draws. `idle`: engines without publishes and pulls of their own.
    """

    def __init__(
        self,
        seed: int,
        size: Size,
        faults: Sequence[Fault] | None = None,
        keeps_trace: bool = False,
        idle: Collection[str] = (),
    ) -> None:
        self.seed = seed
        self.size = size
        self.rng = random.Random(seed)
        self.agenda = Agenda(self.rng.getrandbits(64), keeps_trace)
        self.result = Result(seed)
        names = [f"n{number}" for number in range(size.nodes)]
        traits = self._draw_traits(names)
        shapes = self._draw_engines(names)
        self.drawn = self._draw_faults()
        self.faults = self.drawn if faults is None else list(faults)
        self._by_pull: dict[int, list[Fault]] = {}
        for fault in self.faults:
            self._by_pull.setdefault(fault.pull, []).append(fault)
        self._num_pulls = 0
        self._ends_at_pull = max((fault.pull for fault in self.drawn), default=0) + 6
        self.agenda.note("episode", f"seed {seed}, {traits.transport}, {len(self.faults)} faults")
        self.world = World(self.agenda, traits, names, shapes)
        self.world.on_pull = self._pull_started
        self._sources = [engine for engine in self.world.sources if engine.engine_id not in idle]
        self._sinks = [engine for engine in self.world.sinks if engine.engine_id not in idle]
        self._striker = Faults(self.world, self._struck)

    def _draw_traits(self, names: list[str]) -> Traits:
        return Traits(
            transport=self.rng.choice(TRANSPORTS),
            read_ways=self._draw_read_ways(names),
            num_chunks=self.rng.choice((1, 1, 2, 3, 64)),
            has_low_limits=self.rng.random() < 0.15,
            has_short_leases=self.rng.random() < 0.2,
            drifts=self.rng.random() < 0.3,
            part_bytes=self.rng.choice((4, 8, IDS_PART_BYTES, IDS_PART_BYTES)),
        )

    def _draw_read_ways(self, names: list[str]) -> dict[str, ReadWay]:
        """Draw one way for all nodes, or one for each."""
        if self.rng.random() < 0.7:
            return dict.fromkeys(names, self.rng.choice(READ_WAYS))
        return {name: self.rng.choice(READ_WAYS) for name in names}

    def _draw_engines(self, names: list[str]) -> list[EngineShape]:
        shapes = []
        for number in range(self.size.engines):
            is_source = number % 2 == 0
            tp_size = self.rng.choice((1, 2, 2))
            home = names[number % len(names)] if self.rng.random() < 0.7 else self.rng.choice(names)
            spans = self.rng.random() < 0.25
            nodes = tuple(
                home if not spans or not rank else self.rng.choice(names) for rank in range(tp_size)
            )
            shapes.append(
                EngineShape(
                    f"{'prefill' if is_source else 'decode'}{number}",
                    nodes,
                    is_source,
                    tp_size,
                    self.rng.choice(("HND", "NHD")),
                    self.rng.random() < 0.5,
                    self.rng.random() < 0.4,
                    self.rng.random() < 0.25,
                    self.rng.random() < 0.5,
                )
            )
        return shapes

    def _draw_faults(self) -> list[Fault]:
        """Draw which kinds this episode has, how often, and when each strikes."""
        messages = self._some(MESSAGE_KINDS)
        others = self._some(OTHER_KINDS)
        spread = self.rng.choice((0.5, 1.0, 2.0))  # pulls a fault
        faults = []
        for _ in range(self.size.faults):
            kinds = messages if self.rng.random() < MESSAGE_SHARE else others
            kind = self.rng.choices(list(kinds), list(kinds.values()))[0]
            pull = 1 + int(self.rng.random() * self.size.faults * spread)
            delay = self.rng.choice((0.0, 0.0005, 0.002, 0.01)) * self.rng.random()
            faults.append(Fault(pull, delay, kind, self.rng.getrandbits(32)))
        return sorted(faults, key=lambda fault: (fault.pull, fault.delay_s))

    def _some(self, kinds: dict[str, int]) -> dict[str, float]:
        share = self.rng.choice((0.3, 0.6, 1.0))
        chosen = {
            kind: weight * self.rng.random() for kind, weight in kinds.items() if self.rng.random() < share
        }
        return chosen or dict(kinds)

    # --- running

    def run(self) -> Result:
        """Run it all; the result says what is broken, if anything is."""
        result = self.result
        gc.disable()  # an episode is short, and its cycles are many
        try:
            with _limits(self.world.traits):
                self._run()
        except Violation as violation:
            result.kind, result.problem, result.num_wrong = violation.kind, str(violation), violation.number
        except (AssertionError, KvxferdError, KeyError, ValueError, IndexError, RuntimeError) as error:
            result.kind, result.problem = "violations", f"{type(error).__name__}: {error}"
            if self.agenda.trace is not None:
                import traceback

                self.agenda.trace.append(traceback.format_exc())
        finally:
            gc.enable()
        if result.problem:
            self.agenda.note("oracle", result.problem)
        result.steps, result.virtual_s = self.agenda.num_steps, self.agenda.now
        result.transfers = len(self.world.oracle.wanted)
        result.delivered = sum(wanted.is_delivered for wanted in self.world.oracle.wanted)
        result.digest = self.agenda.digest()
        result.trace = self.agenda.trace or []
        return result

    def _run(self) -> None:
        world, agenda = self.world, self.agenda
        agenda.run(agenda.now + START_S, world.is_ready)
        if not world.is_ready():
            raise Violation("violations", "an engine did not get registered")
        self._strike_all()
        self._striker.is_over = True
        world.forget_plans()
        world.fabric.hurry()
        self._rest()
        if found := world.leftovers():
            raise Violation("leaked", "; ".join(found), len(found))
        NextTransfers(world, self.rng).check()
        if self.rng.random() < LOST_NODE_SHARE:
            LostNode(world, self.rng).check()
        agenda.note("episode", "is at rest")

    def _rest(self) -> None:
        """Wait until nothing is left, or must have ended."""
        end = self.agenda.now + REST_S
        waits_to_the_end = self.rng.random() < FULL_REST_SHARE
        while self.agenda.now < end:
            self.agenda.run(self.agenda.now + LOOK_S)
            if not waits_to_the_end and self.world.is_ready() and not self.world.leftovers():
                return

    def _strike_all(self) -> None:
        """Have traffic until all faults have struck."""
        self._traffic()
        self.agenda.run(self.agenda.now + 600.0, lambda: self._num_pulls >= self._ends_at_pull)

    def _traffic(self) -> None:
        """Publish and have pulled, for as long as faults are to come."""
        if self._striker.is_over:
            return
        rng = self.rng
        for _ in range(rng.choice((1, 1, 2, 3)) if self._sources and self._sinks else 0):
            source, num_readers = rng.choice(self._sources), rng.choice(NUM_READERS)
            sinks = rng.sample(self._sinks, min(num_readers, len(self._sinks)))
            if (transfer := source.publish(num_readers)) is not None:
                self._have_pulled(sinks, transfer)
        if rng.random() < 0.02:
            self._pull_again()
        self.agenda.after(rng.choice((0.002, 0.01, 0.03, 0.3)), self._traffic)

    def _have_pulled(self, sinks: list[Engine], transfer: Transfer) -> None:
        """Have the first engine pull at once, and each other one when it likes."""
        rng = self.rng
        if rng.random() < 0.2:
            sinks[0].prepare(transfer)
        for sink in sinks:
            delays_s = (0.0, 0.0, 0.003) if sink is sinks[0] else (0.0, 0.003, 0.03, 0.5)
            self.agenda.after(rng.choice(delays_s), self._pull, sink, transfer)

    def _pull_again(self) -> None:
        """Have a transfer pulled that is over, maybe of an earlier life in which another had its id."""
        past = [transfer for source in self._sources for transfer in source.past]
        if past and self._sinks:
            self.rng.choice(self._sinks).pull(self.rng.choice(past))

    @staticmethod
    def _pull(sink: Engine, transfer: Transfer) -> None:
        sink.pull(transfer)

    def _pull_started(self) -> None:
        self._num_pulls += 1
        for fault in self._by_pull.get(self._num_pulls, ()):
            self.agenda.after(fault.delay_s, self._striker.strike, fault)

    def _struck(self, kind: str) -> None:
        self.result.faults[kind] += 1
        self.result.in_flight += bool(self.world.oracle.open_pulls)
