"""One episode: a world is built, faults strike under traffic, and all comes to rest."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator

import msgspec

from kvxferd.wire.limits import CHUNK_BYTES
from tests.simulation.aftermath import Aftermath, Hardship
from tests.simulation.audit import METRICS, TERMS, Audit, Turns
from tests.simulation.blunders import Blunders
from tests.simulation.checks import Check, Violation
from tests.simulation.engine import LEAVE_S, EngineShape
from tests.simulation.fabric import Pace
from tests.simulation.faults import Fault, Faults, draw_faults
from tests.simulation.history import HISTORY
from tests.simulation.kernel import SimulationError
from tests.simulation.liars import NAME, Liar
from tests.simulation.operators import STATUS
from tests.simulation.shapes import draw_deployment, draw_model
from tests.simulation.store import MemoryKind
from tests.simulation.transfers import Transfer
from tests.simulation.world import LOW_NUMBERS, SHORT_WAYS, SMALL_NUMBERS, Traits, World

START_S, START_FEW_S = 0.5, 6.0  # twice the most of 95 starts, which nothing hinders
REST_S = 100.0  # by then everything is at rest: longer than any lease, hold or quarantine
LOOK_S = 1.0
# So long nothing is left: what is repeated comes within two seconds, and a member's mover polls until its
# home has lingered, the reply to a heartbeat says so, and it has lingered itself.
QUIET_S = 2.0 + 3.0 + 2.0
BEGIN_S = 1.0  # for spare movers
CHUNKS_IDLE_S = 12.0 - QUIET_S  # then movers have given back what they read into
IDLE_S = 5.0
# In that time: 2, 11 and 157 are the most that were seen, the last where thirteen ranks joined from elsewhere
# and a file of keys was watched; a mover that polls wakes each second. A source's ranks have no timers, a
# reader's may have those of pulls that have ended.
MAX_QUIET_WAKES, MAX_WAKES, MAX_DAEMON_WAKES = 3, 20, 250
SETTLE_S, SETTLE_LOOK_S = 20.0, 2.0  # for movers that end, and spare ones that start behind a backoff
REPLY_S = 5.0
LEAVE_AFTER_S = (0.0, 0.0005, 0.002, 0.02)
TRAFFIC_S = (0.002, 0.01, 0.03, 0.3)
NUM_READERS = (1, 1, 1, 1, 2, 2, 3)
LOST_NODE_SHARE, BLUNDERS_SHARE, STALLS_SHARE = 0.15, 0.5, 0.5  # of the episodes


class Size(msgspec.Struct, frozen=True):
    """How much there is in an episode."""

    nodes: int = 2
    engines: int = 4
    faults: int = 60
    hardships: int = len(Hardship)  # at rest, one after another; 0: nor ends of transfers


class Result(msgspec.Struct):
    """What an episode came to."""

    seed: int
    faults: dict[str, int] = {}
    in_flight: int = 0  # faults that struck while a pull was in flight
    switches: int = 0
    virtual_s: float = 0.0
    wanted: int = 0
    delivered: int = 0
    late: int = 0  # pieces of failed reads that have landed
    check: str = ""  # what is broken
    problem: str = ""
    digest: str = ""
    story: list[str] = []
    met: dict[str, int] = {}  # places of the product, by how often they were met
    took_s: dict[str, list[float]] = {}  # by check: what expectations took, if measured


class Plan(msgspec.Struct, frozen=True):
    """What an episode is to be: drawn from its seed, and maybe cut down since.

    idle: engines that neither publish nor pull. spans: whether engines may span nodes. max_pulls: after how
    many the traffic ends, 0: some time after the last fault.
    """

    seed: int
    size: Size
    traits: Traits
    faults: tuple[Fault, ...]
    idle: tuple[str, ...] = ()
    spans: bool = True
    max_pulls: int = 0

    @classmethod
    def draw(cls, seed: int, size: Size) -> Plan:
        """Draw an episode."""
        rng = random.Random(seed)
        traits = _draw_traits(rng)
        faults = tuple(draw_faults(rng, size.faults))
        last = max((fault.pull for fault in faults), default=0)
        return cls(seed, size, traits, faults, max_pulls=last + 6)

    @property
    def engines(self) -> list[str]:
        """The engines' names."""
        return [f"{'decode' if number % 2 else 'prefill'}{number}" for number in range(self.size.engines)]


def _draw_traits(rng: random.Random) -> Traits:
    return Traits(
        transport=rng.choice(("cma", "cma", "tcp", "rdma")),
        pace=rng.choices([*Pace], (12, 5, 3))[0],
        read=rng.choice(("direct", "covering", "auto", "any")),
        has_low_limits=rng.random() < 0.15,
        low_numbers=tuple(sorted(rng.sample(sorted(LOW_NUMBERS), rng.choice((0, 0, 0, 1, 2))))),
        preempt_share=rng.choice((0.0, 0.0, 0.002)),
        part_bytes=rng.choice((0, 0, 4, 8)),
        send_buffer=rng.choice((0, 0, 2304)),
        io_bytes=rng.choice((0, 0, 0, 100)),
        frame_fds=rng.choice((0, 0, 0, 3)),
        placement=rng.choice(("auto", "direct", "staged", "staged")),
        lies_share=rng.choice((0.0, 0.0, 0.0, 0.02, 0.1)),
        link_bytes=rng.choice((0, 0, 2000)),
        is_far=rng.random() < 0.15,
        has_keys=rng.random() < 0.35,
        staging_bytes=rng.choice((256 << 20, 2 * CHUNK_BYTES, 0, CHUNK_BYTES)),
        dying_share=rng.choice((0.0, 0.5)),
        small_numbers=_draw_small_numbers(rng),
    )


def _draw_small_numbers(rng: random.Random) -> tuple[str, ...]:
    drawn = rng.sample(sorted(SMALL_NUMBERS), rng.choice((0, 5, 15)))
    return tuple(sorted({*drawn, *(SHORT_WAYS if rng.random() < 0.5 else ())}))


class Episode:
    """Runs a plan. What engines do is drawn from its seed, too."""

    def __init__(self, plan: Plan, keeps_story: bool = False, measures: bool = False) -> None:
        self.plan = plan
        self.rng = random.Random(plan.seed ^ 1)
        self.result = Result(plan.seed)
        self._counts: Counter[str] = Counter()
        names = [f"n{number}" for number in range(plan.size.nodes)]
        self._by_pull: dict[int, list[Fault]] = {}
        for fault in plan.faults:
            self._by_pull.setdefault(fault.pull, []).append(fault)
        self._num_pulls = 0
        self._liar: Liar | None = None
        shapes = self._draw_engines(names)
        self.world = World(self.rng.getrandbits(64), plan.traits, names, shapes, keeps_story)
        self.world.on_pull = self._pull_started
        self.world.expectations.took_s = self.result.took_s if measures else None
        self.audit = Audit(self.world)
        self.aftermath = Aftermath(self.world, self.rng, self._wait)
        self.turns = Turns(self.world)
        self._busy = [e for e in self.world.engines if e.shape.name not in plan.idle]
        self._faults = Faults(self.world, self._struck)
        self.world.tell("episode", f"seed {plan.seed}, {plan.traits}, {len(plan.faults)} faults")

    def _draw_engines(self, names: list[str]) -> list[EngineShape]:
        rng = self.rng
        model = self._model = draw_model(rng)
        shapes = []
        for number, name in enumerate(self.plan.engines):
            deployment = draw_deployment(rng, model, name)
            home = names[number % len(names)] if rng.random() < 0.7 else rng.choice(names)
            spans = rng.random() < 0.25
            others = [rng.choice(names) for _ in deployment.ranks][1:]
            if not (spans and self.plan.spans):
                others = [home for _ in others]
            shapes.append(
                EngineShape(
                    name,
                    (home, *others),
                    is_source=number % 2 == 0,
                    deployment=deployment,
                    has_scheduler=rng.random() < 0.5,
                    says_ready=rng.random() < 0.4,
                    has_gpu=rng.random() < 0.25,
                    grows=rng.random() < 0.5,
                    memory=rng.choices([*MemoryKind], (9, 3, 5, 3))[0],
                    uid=rng.choice((0, 0, 1000, 1001)),
                )
            )
        return shapes

    # --- running

    def run(self) -> Result:
        """Run it all; the result says what is broken, if anything is."""
        result, world, kernel = self.result, self.world, self.world.kernel
        try:
            self._run()
        except Violation as violation:
            result.check, result.problem = violation.check.name, violation.text
        except SimulationError as error:
            result.check, result.problem = Check.HUNG.name, str(error)
        result.faults = dict(self._counts)
        result.switches, result.virtual_s = kernel.num_switches, kernel.now - kernel.began
        result.wanted = len(world.wanted)
        result.delivered = sum(wanted.is_delivered for wanted in world.wanted)
        result.late = world.fabric.num_late
        state = (kernel.num_switches, kernel.now, kernel.rng.random(), result.problem)
        result.digest = hashlib.sha256(repr(state).encode()).hexdigest()[:16]
        result.story = world.story or []
        return result

    def _run(self) -> None:
        if share := self.plan.traits.lies_share:
            self.world.start_daemon(NAME)
            self._liar = Liar(self.world, self.rng, self._model, share)
        self._wait_ready()
        self._wait(lambda: False, BEGIN_S)
        self.audit.begin()
        if self._liar is not None:
            self._liar.begin()
        self._traffic()
        self._wait(lambda: self._num_pulls >= self.plan.max_pulls, 600.0)
        self._faults.is_over = True
        self._faults.heal()
        if self._liar is not None:
            self._liar.end()
        self.world.fabric.hurry()
        self._rest()
        self.world.is_at_rest = True
        self._after()
        self._rest()
        self._check_left()
        self._check_idle()
        self._leave()

    def _after(self) -> None:
        """What follows the faults: a transfer arrives at once, then against hardships, or a node is lost."""
        self.aftermath.check_works_again()
        if self.rng.random() < LOST_NODE_SHARE and "owned_ranks" not in self.plan.traits.low_numbers:
            self.aftermath.check_lost_node()
            self._rest()
        if self.plan.size.hardships and not self.plan.traits.may_be_busy:
            self.aftermath.check_hardships(self.plan.size.hardships)
            self.aftermath.check_ends()
            self.aftermath.check_deadlines()
            self._rest()
        if self.rng.random() < STALLS_SHARE and not self.plan.traits.may_be_busy:
            self.aftermath.check_stalls()
            self._rest()
        if self.rng.random() < BLUNDERS_SHARE and not self.plan.traits.may_be_busy:
            Blunders(self.world, self.rng, self._wait).check()
        self.aftermath.check_works_again()

    def _wait(self, until: object, limit_s: float, step_s: float = 0.1) -> bool:
        """Let the world go on; raise Violation where a promise is broken."""
        assert callable(until)
        kernel, world = self.world.kernel, self.world
        end = kernel.now + limit_s
        while not until():
            if world.violation is not None:
                raise world.violation
            if kernel.failures:
                process, text = kernel.failures[0]
                raise Violation(Check.NO_BUG, f"{process.name} raises: {text}")
            if kernel.now >= end:
                return False
            kernel.sleep(step_s)
        return True

    def _wait_ready(self) -> None:
        traits = self.plan.traits
        is_slow = traits.has_few_starts or traits.defers_little
        start_s = START_FEW_S if is_slow else START_S
        if not self._wait(lambda: self.world.is_ready, start_s):
            raise Violation(Check.REGISTERED, "an engine is not registered")

    def _rest(self) -> None:
        """Wait until nothing is left, or must have ended."""

        kernel = self.world.kernel
        busy_at = kernel.now

        def is_nothing_left() -> bool:
            nonlocal busy_at
            if next(self._left(), None) is not None:
                busy_at = kernel.now
            return kernel.now >= busy_at + QUIET_S

        if not self._wait(is_nothing_left, REST_S, LOOK_S):
            raise Violation(Check.REST, "; ".join(self._left()))
        for worker in self.world.workers:
            worker.check_memory()
        self._wait(lambda: True, 0.0)
        if self.world.violation is not None:
            raise self.world.violation

    def _check_left(self) -> None:
        """What has ended is not kept, not even until idle timers forget it."""
        for _ in range(int(SETTLE_S / SETTLE_LOOK_S)):
            if not (left := self.audit.left() or self._ask(STATUS) or self._ask(METRICS)):
                break
            self._wait(lambda: False, SETTLE_LOOK_S)
        else:
            raise Violation(Check.REST, "; ".join(left))
        if wrong := self._ask(HISTORY) + self._ask(TERMS):
            raise Violation(Check.RECORDED, "; ".join(wrong))

    def _check_idle(self) -> None:
        """At rest nobody does anything but what a clock has them do."""
        self._wait(lambda: False, CHUNKS_IDLE_S)
        processes = [one for one in self.world.kernel.processes.values() if not one.is_dead]
        sources = {worker.process for source in self.world.sources for worker in source.workers}
        before = {one: one.num_wakes for one in processes}
        self._wait(lambda: False, IDLE_S)
        for one in processes:
            most = MAX_DAEMON_WAKES if one.name in self.world.node_names else MAX_WAKES
            if self._liar is not None:
                most *= 2  # its address is tried for a while
            if one in sources or " mover " in one.name:
                most = MAX_QUIET_WAKES
            if (number := one.num_wakes - before[one]) > most:
                raise Violation(Check.IDLE, f"{one.name} wakes {number} times in {IDLE_S:g} s at rest")

    def _leave(self) -> None:
        """All close their sessions, most in the middle of a request."""
        for source in self.world.sources:
            if (transfer := source.publish(1)) is not None:
                self.rng.choice(self.world.sinks).pull(transfer)
        self.world.kernel.sleep(self.rng.choice(LEAVE_AFTER_S))
        workers = self.world.workers
        for worker in workers:
            worker.do(worker.leave)
        if not self._wait(lambda: not any(worker.is_alive for worker in workers), LEAVE_S):
            raise Violation(Check.HUNG, "a process that closes its session does not end")
        self._wait(lambda: True, 0.0)

    def _ask(self, path: str) -> list[str]:
        self.audit.ask(path)
        if not self._wait(lambda: self.audit.is_answered, REPLY_S):
            raise Violation(Check.REST, "a daemon does not reply to its operator")
        return self.audit.left_in_daemons(path)

    def _left(self) -> Iterator[str]:
        """Yield what would not be there at rest."""
        now = self.world.kernel.now
        for engine in self.world.engines:
            yield from (f"{w.name} is not ready" for w in engine.workers if not w.is_ready)
            yield from (f"{w.name} has {len(w.pulls)} pulls" for w in engine.workers if w.pulls)
            yield from (f"{engine.shape.name} has {name}" for name in engine.transfers)
            yield from (f"{t.transfer_id} is prepared" for t in engine.past if t.is_prepared(now))
        yield from (one.text for one in self.world.expectations.unmet)

    # --- traffic

    def _traffic(self) -> None:
        """Publish and have pulled, for as long as faults are to come."""
        if self._faults.is_over:
            return
        world, rng = self.world, self.rng
        sources = [engine for engine in self._busy if engine.shape.is_source]
        sinks_of_all = [engine for engine in self._busy if not engine.shape.is_source]
        for _ in range(rng.choice((1, 1, 2, 3)) if sources and sinks_of_all else 0):
            source, num_readers = rng.choice(sources), rng.choice(NUM_READERS)
            sinks = rng.sample(sinks_of_all, min(num_readers, len(sinks_of_all)))
            if (transfer := source.publish(num_readers)) is not None:
                self._have_pulled(sinks, transfer)
        if rng.random() < 0.02:
            self._pull_again()
        world.after(rng.choice(TRAFFIC_S), self._traffic)

    def _have_pulled(self, sinks: list, transfer: Transfer) -> None:
        for sink in sinks:
            delays_s = (0.0, 0.0, 0.003) if sink is sinks[0] else (0.0, 0.003, 0.03, 0.5)
            self.world.after(self.rng.choice(delays_s), sink.pull, transfer)

    def _pull_again(self) -> None:
        """Have a transfer pulled that is over, maybe of an earlier life in which another had its id."""
        past = [transfer for source in self.world.sources for transfer in source.past]
        if past:
            self.rng.choice(self.world.sinks).pull(self.rng.choice(past))

    def _pull_started(self) -> None:
        self._num_pulls += 1
        for fault in self._by_pull.get(self._num_pulls, ()):
            self.world.after(fault.delay_s, self._faults.plan, fault)

    def _struck(self, kind: str) -> None:
        self._counts[kind] += 1
        self.result.in_flight += bool(self.world.open_pulls)
