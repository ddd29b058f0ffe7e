"""Operators' probes of the way between two nodes: their movers as data, and what must hold of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxferd.core.events import ProbeRequested
from kvxferd.core.probe_client import MAX_PROBE_S
from kvxferd.core.probe_record import REQUESTED, ProbeRecord
from kvxferd.errors import Code
from kvxferd.ids import AgentName, ProbeId
from kvxferd.wire import mover as mv
from kvxferd.wire.common import Message
from kvxferd.wire.limits import MIN_PROBE_BYTES
from kvxferd.wire.probe import DIGEST_BYTES, ProbeRead, ProbeRegion, num_slices
from tests.property.simulation.agenda import Actor, Pipe
from tests.property.simulation.oracle import GRACE_S, Violation

if TYPE_CHECKING:
    from tests.property.simulation.daemon import Daemon
    from tests.property.simulation.shells.mover_pool import SimulatedHandle

TAKES_S = (0.002, 0.05, 0.6, 4.0)  # to fill a region, or to read it
LOOK_S = 0.1  # between two looks at a source that is stopped


class ProbeMover(Actor):
    """A mover without a rank: it serves one region, or reads another's."""

    def __init__(self, daemon: Daemon, handle: SimulatedHandle) -> None:
        super().__init__(daemon.agenda, handle.agent)
        self.mover_id = handle.mover_id
        self.from_daemon = Pipe(self, daemon.local_latency_s)
        self._to_daemon = handle.to_daemon
        self._daemon = daemon
        self._process = handle.process
        self._digests = b""
        self._agents = daemon.world.probes.movers
        self._agents[handle.agent] = self
        handle.process.watch(lambda: self.die("killed"))

    def die(self, why: str) -> None:
        """The process is gone."""
        if self.is_alive:
            self.note(f"dies: {why}")
            self.is_alive = False
            del self._agents[AgentName(self.name)]
            self._process.end()

    def handle(self, message: Message) -> None:
        """Handle a message of the daemon."""
        delay_s = self._daemon.rng.choice(TAKES_S)
        match message:
            case mv.ServeProbe():
                self.after(delay_s, self._serve, message.size_bytes)
            case mv.ReadProbe():
                self.after(delay_s, self._read, message.region)

    def _report(self, message: mv.FromMover) -> None:
        self._to_daemon.send(self._daemon.handle_probe_mover_message, self, message)

    def _serve(self, size_bytes: int) -> None:
        self._digests = self._daemon.rng.randbytes(DIGEST_BYTES * num_slices(size_bytes))
        region = ProbeRegion(AgentName(self.name), 4096, size_bytes, b"probe", self._digests)
        self._report(mv.ProbeServed(region=region))

    def _read(self, region: ProbeRegion) -> None:
        source = self._agents.get(region.agent)
        if source is None:
            text = f"cannot read from agent {region.agent}: it is gone"
            self._report(mv.ProbeFailed(code=Code.TRANSPORT, message=text))
        elif source.is_stopped:
            self.after(LOOK_S, self._read, region)
        else:
            right = region.size_bytes if region.digests == source._digests else 0
            read = ProbeRead(right, region.size_bytes - right, 0.01, region.size_bytes, 0.001)
            self._report(mv.ProbeFinished(read=read))


class Probes:
    """All probes of an episode: each ends once, in time, and with the right bytes where it was read."""

    def __init__(self) -> None:
        self.movers: dict[AgentName, ProbeMover] = {}
        self._open: dict[tuple[Daemon, ProbeId], float] = {}  # and when it must have ended
        self.num_read = 0  # in both directions
        self._last_number = 0

    def request(self, daemon: Daemon, other: Daemon) -> None:
        """An operator requests a probe of the way between two nodes."""
        self._last_number += 1
        probe = ProbeId(f"p{self._last_number}")
        due = daemon.agenda.now + MAX_PROBE_S + GRACE_S
        self._open[daemon, probe] = due
        daemon.note(f"probes {other.endpoint} as {probe}")
        daemon.at(due, self._check_ended, daemon, probe)
        daemon._run(daemon.feed, (ProbeRequested(probe, other.endpoint, MIN_PROBE_BYTES),))

    def _check_ended(self, daemon: Daemon, probe: ProbeId) -> None:
        if (daemon, probe) not in self._open:
            return
        # A daemon that was stopped has its time from there on.
        due = daemon.last_stop_at + MAX_PROBE_S + GRACE_S
        if daemon.agenda.now < due:
            daemon.at(due, self._check_ended, daemon, probe)
            return
        raise Violation("hung", f"probe {probe} of {daemon.name} has not ended in time")

    def reported(self, daemon: Daemon, record: ProbeRecord) -> None:
        """A daemon reports a probe that has ended."""
        daemon.note(f"reports {record.role} probe {record.probe}: {record.code} {record.message}")
        for direction in (record.read, record.read_back):
            if direction is not None and direction.wrong_bytes:
                raise Violation("wrong_bytes", f"probe {record.probe} of {daemon.name} has read wrong bytes")
        if record.role != REQUESTED:
            return
        if self._open.pop((daemon, record.probe), None) is None:
            raise Violation("violations", f"probe {record.probe} of {daemon.name} ended twice")
        if record.is_ok:
            for direction in (record.read, record.read_back):
                assert direction is not None, "a direction is not known"
                assert direction.verified_bytes, "nothing was read"
            self.num_read += 1
