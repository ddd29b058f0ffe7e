"""How long things take after a fault, in virtual time: recovery, release, quarantine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvxferd.client import events as ce
from kvxferd.errors import Code
from tests.property.simulation.daemon import Daemon
from tests.property.simulation.engine import MAX_ATTEMPTS, Engine, Transfer
from tests.property.simulation.episode import Episode, Size
from tests.property.simulation.faults import MESSAGE_KINDS, OTHER_KINDS, Fault
from tests.property.simulation.oracle import Pull, Violation
from tests.property.simulation.process import Process
from tests.property.simulation.watcher import Watcher

SEVERAL = "several at once"
PROBE_EVERY_S = 0.05
MAX_PROBES = 2  # of a pair, at a time
STRIKE_WITHIN_S = 3.0  # a message to lose may not come before
RECOVER_S = 60.0  # past this an episode is broken
MEASURES = {
    "recovery": "from the fault until every pair of engines has delivered a transfer published after it",
    "registration": "from the fault until every process of every engine is registered again",
    "release": "from the last delivery, the withdrawal or the lease's end to Released",
    "quarantine": "from Failed with safe_to_reuse=False to Quiesced",
}


@dataclass(frozen=True)
class Sample:
    """One measured time."""

    seconds: float
    seed: int  # of the episode
    at: float  # when it ended, in the episode's time
    what: str


class Distributions:
    """All samples, by measure and by what caused them."""

    def __init__(self) -> None:
        self.samples: defaultdict[tuple[str, str], list[Sample]] = defaultdict(list)

    def add(self, measure: str, cause: str, sample: Sample) -> None:
        """Keep a sample."""
        self.samples[measure, cause].append(sample)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each measure and cause: count, p50, p99 and the worst, in seconds."""
        order = list(MEASURES)
        found = []
        for measure, cause in sorted(self.samples, key=lambda key: (order.index(key[0]), key[1])):
            samples = self.samples[measure, cause]
            worst = max(samples, key=lambda sample: sample.seconds)
            found.append({"measure": measure, "cause": cause, "n": len(samples)} | _quantiles(samples, worst))
        return found

    def table(self) -> str:
        """Return the rows as a Markdown table."""
        head = ("measure", "cause", "n", "p50_s", "p99_s", "worst_s", "seed", "what")
        lines = [" | ".join(("", *head, "")).strip(), "|" + " --- |" * len(head)]
        lines += ["| " + " | ".join(str(row[column]) for column in head) + " |" for row in self.rows()]
        return "\n".join(lines)


def _quantiles(samples: Sequence[Sample], worst: Sample) -> dict[str, Any]:
    seconds = sorted(sample.seconds for sample in samples)
    p50, p99 = (seconds[min(len(seconds) - 1, int(share * len(seconds)))] for share in (0.5, 0.99))
    return {
        "p50_s": round(p50, 3),
        "p99_s": round(p99, 3),
        "worst_s": round(worst.seconds, 3),
        "seed": worst.seed,
        "what": f"{worst.what} at {worst.at:.3f}",
    }


@dataclass(eq=False)
class Probe:
    """One transfer between a pair, pulled once by each rank of the sink."""

    transfer: Transfer
    published_at: float
    pulls: list[Pull] = field(default_factory=list)

    @property
    def is_delivered(self) -> bool:
        """Whether every rank of the sink has it."""
        return bool(self.pulls) and all(pull.ended == "delivered" for pull in self.pulls)

    @property
    def is_lost(self) -> bool:
        """Whether a rank will never have it: its pull ended, or the engine had no blocks to pull into."""
        return not self.pulls or any(
            pull.ended in ("failed", "in-doubt") or not pull.process.is_alive for pull in self.pulls
        )


_TransferKey = tuple[str, str, str]  # of the engine, its generation, and the transfer


@dataclass
class _Release:
    """When a transfer's release became due, and why."""

    due_at: float
    lease_ends_at: float  # as published; grants may prolong it
    why: str = ""
    cause: str = ""  # the last fault before it became due


class LivenessEpisode(Episode, Watcher):
    """Faults one after another, or some at once; the next come when all pairs of engines work again.

    Each pair always has a transfer or two under way, like the probes of `make chaos`.
    """

    def __init__(self, found: Distributions, seed: int, size: Size, keeps_trace: bool = False) -> None:
        self._found = found
        self._armed: list[Fault] = []
        self._num_struck = 0
        self._cause = "none"
        self._struck_at = 0.0
        self._unready_at = 0.0
        self._releases: dict[_TransferKey, _Release] = {}
        self._working: dict[tuple[Engine, Engine], None] = {}
        self._probes: dict[tuple[Engine, Engine], list[Probe]] = {}
        super().__init__(seed, size, keeps_trace=keeps_trace)
        self._pairs = [(source, sink) for source in self._sources for sink in self._sinks]
        self._probes = {pair: [] for pair in self._pairs}
        self.world.watch(self)

    def _draw_faults(self) -> list[Fault]:
        """Draw kinds evenly; they strike at the next pull once everything works."""
        kinds = [*MESSAGE_KINDS, *OTHER_KINDS]
        delays = (0.0, 0.0005, 0.002, 0.01)
        return [
            Fault(0, self.rng.choice(delays), self.rng.choice(kinds), self.rng.getrandbits(32))
            for _ in range(self.size.faults)
        ]

    # --- the episode

    def _strike_all(self) -> None:
        agenda, rng = self.agenda, self.rng
        for pair in self._pairs:
            agenda.after(rng.uniform(0.0, PROBE_EVERY_S), self._probe, pair)
        faults = list(self.faults)
        while faults:
            agenda.run(agenda.now + rng.choice((0.2, 1.0, 5.0)))
            number = rng.choice((1, 1, 1, 2, 3))
            self._round(faults[:number])
            del faults[:number]

    def _round(self, faults: list[Fault]) -> None:
        agenda, world = self.agenda, self.world
        self._armed = list(faults)
        self._num_struck = 0
        agenda.run(agenda.now + STRIKE_WITHIN_S, lambda: self._num_struck >= len(faults))
        self._armed = []
        world.network.planned.clear()
        if not self._num_struck:
            return
        until = agenda.now + RECOVER_S
        agenda.run(until, self._is_recovered)
        if agenda.now >= until:
            raise Violation("hung", f"not every pair has a transfer delivered {RECOVER_S:g} s after a fault")
        self._add("recovery", agenda.now - self._struck_at, "all pairs")
        self._add("registration", self._unready_at - self._struck_at, "all processes")

    def _pull_started(self) -> None:
        super()._pull_started()
        armed, self._armed = self._armed, []
        for fault in armed:
            self.agenda.after(fault.delay_s, self._striker.strike, fault)

    def _struck(self, kind: str) -> None:
        super()._struck(kind)
        now = self.agenda.now
        self._num_struck += 1
        self._cause = kind if self._num_struck == 1 or self._cause == kind else SEVERAL
        self._struck_at = self._unready_at = now
        self._working = {}

    def _is_recovered(self) -> bool:
        if not self.world.is_ready():
            self._unready_at = self.agenda.now
            return False
        return len(self._working) == len(self._pairs)

    def _add(self, measure: str, seconds: float, what: str, cause: str = "") -> None:
        self._found.add(measure, cause or self._cause, Sample(seconds, self.seed, self.agenda.now, what))

    # --- transfers that are always under way

    def _probe(self, pair: tuple[Engine, Engine]) -> None:
        if self._striker.is_over:
            return
        source, sink = pair
        probes = self._probes[pair]
        for probe in [probe for probe in probes if probe.is_lost]:
            probes.remove(probe)
            if source.is_usable and probe.transfer.transfer_id in source.transfers:
                source.unpublish(probe.transfer)
        if len(probes) < MAX_PROBES and sink.is_usable and (transfer := source.publish()) is not None:
            before = len(self.world.oracle.wanted)
            probe = Probe(transfer, self.agenda.now)
            probes.append(probe)
            num_open = len(self.world.oracle.open_pulls)
            sink.pull(transfer)
            probe.pulls = list(self.world.oracle.open_pulls)[num_open:]
            for wanted in self.world.oracle.wanted[before:]:
                wanted.attempts = MAX_ATTEMPTS  # the next probe is the retry
        self.agenda.after(PROBE_EVERY_S * self.rng.uniform(0.5, 1.5), self._probe, pair)

    # --- what the engines do

    def daemon_started(self, daemon: Daemon) -> None:
        """Have the daemon's leases tell when they end."""
        published = daemon.node.published
        release = published.release

        def release_and_tell(transfer: Any, why: Code) -> None:
            if why is Code.LEASE_EXPIRED:
                due = daemon.clock.when(transfer.expires_at)
                key = (transfer.engine.engine_id, transfer.engine.generation, transfer.transfer_id)
                self._due(key, min(due, self.agenda.now), str(why))
            release(transfer, why)

        published.release = release_and_tell  # type: ignore[method-assign]

    def published(self, engine: Engine, transfer: Transfer) -> None:
        """Note when its lease ends."""
        now = self.agenda.now
        key = (engine.engine_id, engine.generation, transfer.transfer_id)
        self._releases[key] = _Release(0.0, now + self.world.lease_s)

    def withdrawn(self, engine: Engine, transfer: Transfer) -> None:
        """Note when it was."""
        key = (engine.engine_id, engine.generation, transfer.transfer_id)
        self._due(key, self.agenda.now, "unpublished")

    def _due(self, key: _TransferKey, at: float, why: str) -> None:
        release = self._releases.get(key)
        if release is not None and not release.why:
            release.due_at, release.why, release.cause = at, why, self._cause

    def handled(self, process: Process, event: ce.Event) -> None:
        """Measure what the event ends."""
        match event:
            case ce.Delivered():
                self._delivered(process, event)
            case ce.Quiesced():
                pull = process.engine.pulls[process, event.ticket.number]
                seconds = self.agenda.now - pull.ended_at
                self._add("quarantine", seconds, f"{process.name} ticket {pull.ticket}")
            case ce.Released():
                self._released(process, event)

    def _delivered(self, process: Process, event: ce.Delivered) -> None:
        pull = process.engine.pulls[process, event.ticket.number]
        now, transfer = self.agenda.now, self.world.transfer_of[pull]
        for pair, probes in self._probes.items():
            for probe in [probe for probe in probes if probe.transfer is transfer]:
                if all(other is pull or other.ended == "delivered" for other in probe.pulls):
                    probes.remove(probe)
                    self._due((pair[0].engine_id, pair[0].generation, transfer.transfer_id), now, "delivered")
                    if probe.published_at >= self._struck_at:
                        self._working[pair] = None

    def _released(self, process: Process, event: ce.Released) -> None:
        engine = process.engine
        if process is not engine.publisher:
            return
        release = self._releases.pop((engine.engine_id, engine.generation, event.transfer_id), None)
        now = self.agenda.now
        if release is not None and not release.why and event.why == Code.LEASE_EXPIRED:
            release.due_at, release.why = release.lease_ends_at, "lease, without a daemon"
            release.cause = self._cause
        if release is not None and release.why:
            what = f"{event.transfer_id} ({release.why}, released as {event.why})"
            self._add("release", max(0.0, now - release.due_at), what, release.cause)
