"""A node whose core is real and whose shell is a simulation's."""

from __future__ import annotations

from math import inf
from typing import assert_never

from kvxferd.core import Node
from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.ids import AgentName, Endpoint, MoverId, SessionId
from kvxferd.plan import PlanJob
from kvxferd.records import Record, ServedRecord
from kvxferd.wire.mover import MoverUp
from tests.support.fetched_engine import outcome_of
from tests.support.sim.ports import Ports
from tests.support.sim.schedule import Later

LIBRARY = "simulated"  # by its name the forkserver's transfer library


class SimNode(Ports):
    """Feeds the core one event at a time, and gives each effect, in order, to a method of its subclass.

    `check_integrity` runs after every `integrity_every` events; 0: never.
    """

    def __init__(self, node: Node, later: Later, integrity_every: int = 1) -> None:
        self.node = node
        self.integrity_every = integrity_every
        self._later = later
        self._num_events = 0
        self._tick_at = inf

    # --- time

    def when(self, deadline: float) -> float:
        """Return the time of the schedule at which the node's clock shows `deadline`."""
        return deadline

    def set_timer(self) -> None:
        """Have a tick when the core's next timer is due."""
        deadline = self.node.next_deadline()
        if deadline is not None and (when := self.when(deadline)) < self._tick_at:
            self._tick_at = when
            self._later.at(when, self._tick, when)

    def _tick(self, due: float) -> None:
        if due != self._tick_at:
            return  # an earlier timer was set since
        self._tick_at = inf
        deadline = self.node.next_deadline()
        if deadline is not None and deadline <= self.now():
            self.feed(ev.Tick())
        else:
            self.set_timer()

    # --- the core

    def feed(self, event: ev.Event) -> None:
        """Feed the core, and apply its effects."""
        for effect in self.decide(event):
            self.apply(effect)
        self._num_events += 1
        if self.integrity_every and not self._num_events % self.integrity_every:
            self.node.check_integrity()
        self.set_timer()

    def feed_soon(self, event: ev.Event) -> None:
        """Feed an event that follows an effect: after the other effects of the present event."""
        self._later.after(0.0, self.feed, event)

    def decide(self, event: ev.Event) -> list[fx.Effect]:
        """Return the core's effects."""
        return self.node.feed(event, self.now())

    def apply(self, effect: fx.Effect) -> None:
        """Apply one effect."""
        match effect:
            case fx.SendToWorker():
                self.send_to_worker(effect)
            case fx.CloseWorkerConnection():
                self.send_to_worker(fx.SendToWorker(effect.session, effect.farewell))
                self.close_worker(effect.session)
            case fx.CommitRegionFds():
                self.commit_region_fds(effect.session)
            case fx.OverwriteFenceWord():
                self.overwrite_fence_word(effect.session, effect.slot)
            case fx.ForkMover():
                self.fork_mover(effect.mover, effect.agent)
            case fx.AcceptResidentMover():
                self.accept_resident_mover(effect.mover, effect.session)
            case fx.StartForkserver():
                self.feed_soon(ev.ForkserverReady(LIBRARY))
            case fx.KillMover():
                self.kill_mover(effect.mover)
            case fx.SendToMover():
                self.send_to_mover(effect.mover, effect.message)
            case fx.BindMover():
                self.bind_mover(effect)
            case fx.ShareFencePage():
                self.share_fence_page(effect.mover, effect.session)
            case fx.SendToPeer():
                self.send_to_peer(effect.endpoint, effect.message)
            case fx.ReplyToPeer():
                self.reply_to_peer(effect.route, effect.message)
            case fx.ClosePeerConnection():
                self.close_peer_connection(effect.endpoint)
            case fx.SaveOwnerships():
                self.save_ownerships()
            case fx.EmitRecord():
                self.emit_record(effect.record)
            case fx.CountServed():
                self.count_served(effect.served)
            case fx.MakePlan():
                self.make_plan(effect.job)
            case _:
                assert_never(effect)

    def report_up(self, mover: MoverId, agent: AgentName) -> None:
        """Report that a mover has made its agent, after the other effects of the present event."""
        self.feed_soon(ev.MoverMessage(mover, MoverUp(agent=agent, library=LIBRARY, pid=1)))

    # --- effects that a shell may do without

    def accept_resident_mover(self, mover: MoverId, session: SessionId) -> None: ...

    def commit_region_fds(self, session: SessionId) -> None: ...

    def close_peer_connection(self, endpoint: Endpoint) -> None: ...

    def save_ownerships(self) -> None: ...

    def emit_record(self, record: Record) -> None: ...

    def count_served(self, served: ServedRecord) -> None: ...

    def make_plan(self, job: PlanJob) -> None:
        self.feed_soon(ev.PlanMade(job, outcome_of(job)))
