"""Why a pull fails and a transfer ends: each only for a reason that there is, which concerns it.

What goes wrong is noted where it happens, by the processes and links that it happens to: a fault that strikes
one engine excuses no pull of another's, although both are of one node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from kvxferd import client
from kvxferd.errors import Code
from tests.simulation.checks import Check
from tests.simulation.fabric import Pace
from tests.simulation.kernel import Process

if TYPE_CHECKING:
    from tests.simulation.transfers import Pull, Transfer
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

SHORTLY_S = 14.0  # after a fault, in which it still shows: a home knows a restarted node's ranks within 12
OWN_TIMER_S = 3.0  # within which a client has its restarted daemon's word again
# A deadline that an undisturbed pull meets, by the pace of reads.
LONG_DEADLINE_S = {Pace.QUICK: 3.0, Pace.SLOW: 3.0, Pace.LONG: 16.0}
# From the last word of what is written to the end of a pull, by the pace of reads.
READY_S = {Pace.QUICK: 8.0, Pace.SLOW: 12.0, Pace.LONG: 40.0}
READY_SOON_S = 1.8  # where no fault shows: 0.7 was the most of 1,500 faults
ONE_CHUNK = "mover.transport.staging MAX_ACTIVE_CHUNKS"  # so staged reads wait for each other, a second each
READY_KEPT_S = 8.0  # as long as a default lease of `tests.simulation.world`
SILENT_S = 14.0  # `peer.silent_after_s`, a repetition of a request, and two seconds
REFUSED_S = 3.5  # `peer.restart_grace_s`, or twice `transfer.unknown_wait_s`, and what is on its way
LEASE_SLACK_S = 0.25  # between a publish and the daemon's clock of it

# Why no pull fails among honest nodes, whatever strikes them.
OF_LIARS = frozenset({
    Code.OUT_OF_PLACE, Code.INTERNAL, Code.BLOCKS_INVALID, Code.COVERAGE_GAP, Code.LAYOUT_INCOMPATIBLE,
    Code.BAD_VERSION, Code.FRAME_TOO_LARGE, Code.BAD_FRAME, Code.NONCE_WRONG, Code.TOKENS_NOT_PUBLISHED,
    Code.NOT_ALLOWED, Code.NOT_PP_AWARE, Code.LAYERS_MISSING, Code.UNEQUAL_STAGES, Code.SHAPE_MISMATCH,
    Code.TRANSFER_EXISTS,
})  # fmt: skip
# Why no publish of an honest engine is refused.
OF_LIARS_PUBLISH = frozenset(
    {Code.TRANSFER_EXISTS, Code.BLOCKS_INVALID, Code.NONCE_WRONG, Code.INTERNAL, Code.OUT_OF_PLACE}
)


class Reasons:
    """Knows what was struck, and when."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._struck = world.expectations.disturb
        self.turned_away_until = -math.inf
        world.expectations.is_halted = self._is_halted
        world.kernel.on_strike = self.process_struck
        world.network.on_strike = self.link_struck
        world.fabric.on_strike = self.process_struck

    # --- what was struck

    def process_struck(self, process: Process, lasting_s: float = 0.0) -> None:
        """A fault strikes a process."""
        self._struck(lasting_s, self._root_of(process))

    def turned_away(self, one: str, other: str, lasting_s: float) -> None:
        """A host does not admit another for so long."""
        self.turned_away_until = max(self.turned_away_until, self._world.kernel.now + lasting_s)
        self.link_struck(one, other, lasting_s)

    def link_struck(self, one: str, other: str, lasting_s: float) -> None:
        """A fault strikes what joins two hosts."""
        self._struck(lasting_s, frozenset((one, other)))

    def _root_of(self, process: Process) -> Hashable:
        """Return a worker's process, or the node whose daemon has started it."""
        while process.parent is not None and process.parent is not self._world.kernel.host:
            process = process.parent
        return ("daemon", process.name) if process.name in self._world.daemons else process

    def _parties(self, pull: Pull) -> set[Hashable]:
        """All whose faults may fail a pull: processes, daemons with their movers, links between them."""
        sources = [pull.transfer.publisher, *pull.transfer.workers]
        readers = pull.worker.engine.ranks  # the reader's home asks for all
        nodes = {worker.node for worker in (*sources, *readers, pull.worker)}
        hosts = [self._world.host_of(node) for node in nodes]
        return {
            *(worker.process for worker in sources),
            pull.worker.process,
            *(("daemon", node) for node in nodes),
            *(frozenset((one, other)) for one in hosts for other in hosts),
        }

    @staticmethod
    def _own_parties(pull: Pull) -> set[Hashable]:
        return {pull.worker.process, ("daemon", pull.worker.node)}

    def is_struck(self, since: float, parties: set[Hashable]) -> bool:
        """Whether one of these was struck since then, or does not run as it should."""
        return self._world.expectations.is_disturbed(since, *parties) or self._is_halted(tuple(parties))

    def _is_halted(self, parties: tuple[Hashable, ...]) -> bool:
        processes = self._world.kernel.processes.values()
        return any(
            (p.is_stopped or p.slowness > 1.0) and not p.is_dead and self._root_of(p) in parties
            for p in processes
        )

    # --- pulls

    @property
    def of_liars(self) -> frozenset[Code]:
        """Why no pull fails now, and no session ends, among honest nodes."""
        is_one_turned_away = self._world.kernel.now < self.turned_away_until + SHORTLY_S
        return OF_LIARS - {Code.NOT_ALLOWED} if is_one_turned_away else OF_LIARS

    def check_failed(self, pull: Pull, event: client.Failed) -> None:
        """A pull fails for a reason that there is."""
        if pull.transfer.is_of_liar:
            return
        why = self._without_reason(pull, event)
        if why:
            ticket = f"pull {event.ticket.number} of {pull.worker.name}"
            self._world.violate(Check.REASON, f"{ticket} failed as {event.code}, and {why}: {event.message}")
        self._check_own_timer(pull, event)

    def _check_own_timer(self, pull: Pull, event: client.Failed) -> None:
        node = pull.worker.node
        since = min(pull.began, pull.deadline - OWN_TIMER_S)
        if "the daemon is silent" in event.message and not self.is_struck(since, self._own_parties(pull)):
            ticket = f"pull {event.ticket.number} of {pull.worker.name}"
            self._world.violate(Check.OWN_TIMER, f"{ticket} was ended so, and {node} ran: {event.message}")

    def _without_reason(self, pull: Pull, event: client.Failed) -> str:
        """Return what a failed pull lacks of a reason; "" where it has one."""
        transfer, now = pull.transfer, self._world.kernel.now
        code = event.code
        is_cut_off = "inside a frame" in event.message or "descriptors were cut off" in event.message
        if code in self.of_liars and not is_cut_off:
            return "all are honest"
        # A source that replies for too long that it still waits is `deadline`, too: pulls share the request.
        # So is a session whose client takes no mover.
        is_kept = "cannot wait longer for" in event.message or "cannot bind a mover" in event.message
        # Of a mover that stages: what earlier reads left in doubt, until it is replaced.
        has_doubts = "every buffer is in doubt" in event.message
        is_dropped = "an operator dropped that peer" in event.message
        if is_dropped:
            code = Code.PEER_UNREACHABLE
        if (is_so := _NEEDS.get(code)) is not None and not is_so(self, pull) and not is_kept:
            return "nothing like it has happened"
        if "transfer.max_hold_s" in event.message and not pull.is_progressive:
            return "it waits for no source"
        is_withdrawn = transfer.is_withdrawn or transfer.is_over or transfer.abandoned
        for worker in (transfer.publisher, pull.worker):  # a later generation has taken over
            is_withdrawn = is_withdrawn or worker.generation != worker.engine.generation
        # A pull that comes late may find the lease over.
        is_late = now >= transfer.published_at + transfer.lease_s - LEASE_SLACK_S
        long_s = LONG_DEADLINE_S[self._world.traits.pace]
        is_short = code == Code.DEADLINE and pull.deadline - pull.began < long_s
        # What was reported of others before their publish, which never came, takes its place for minutes.
        is_full = code == Code.TRANSFER_NOT_READY and self._world.traits.may_be_busy
        # A source that stalls is refused to all ranks, also to those that had read nothing of it.
        is_refused = code == Code.SOURCE_STALLED and transfer.reads_hang
        if (
            pull.is_cancelled or is_withdrawn or is_late or is_short or is_full or has_doubts or is_refused
            or code == Code.BUSY or self._is_any_struck(pull)
        ):  # fmt: skip
            return ""
        return "nothing that concerns it has happened"

    def transfer_is_whole(self, transfer: Transfer) -> None:
        """All ranks have written, and have said so: who waits for it is told."""
        transfer.is_whole, transfer.whole_at = True, self._world.kernel.now
        for pull in transfer.pulls:
            self.expect_ready(pull)

    def expect_ready(self, pull: Pull) -> None:
        """A pull of what is whole ends soon after its client has sent it, however far its deadline is."""
        transfer, parties = pull.transfer, self._parties(pull)
        if not transfer.is_whole or not pull.kernels.is_done or pull.ended or transfer.is_of_liar:
            return

        def is_met() -> bool:
            if pull.ended or transfer.is_over or not pull.worker.is_alive:
                return True
            # A rank that was cut off for so long repeats its `ready` no more.
            is_old = self._world.kernel.now >= transfer.whole_at + READY_KEPT_S
            return is_old and self.is_struck(transfer.whole_at - SHORTLY_S, parties)

        traits = self._world.traits
        within_s = READY_S[traits.pace]
        is_slow = traits.defers_little or ONE_CHUNK in traits.small_numbers
        is_soon = not transfer.reads_hang and not is_slow
        for engine in (transfer.publisher.engine, pull.worker.engine):
            if len(set(engine.shape.nodes)) > 1:
                within_s += SHORTLY_S  # a home has to learn a restarted node's ranks
        self._world.expectations.expect(
            Check.READY,
            f"{pull.transfer.transfer_id} is whole, and the pull of {pull.worker.name} goes on",
            tuple(parties),
            within_s,
            is_met,
            READY_SOON_S if is_soon else math.inf,
        )

    def daemon_is_gone(self, node: str) -> None:
        """Who reads from its engines, or waits for them, is told soon, unless it is back: it may know all."""
        gone_at = self._world.kernel.now

        def is_back() -> bool:
            return self._world.started_at(node) >= gone_at

        def is_excused(pull: Pull) -> bool:
            # A rank without a session has it again once its home takes it back, and the home may be gone.
            reader, home = pull.worker, pull.worker.engine.shape.nodes[0]
            is_held_up = home == node and not reader.is_connected
            return is_held_up or not reader.is_alive or self._world.daemons[reader.node].is_dead or is_back()

        for pull in self._world.open_pulls:
            publisher = pull.transfer.publisher
            if node != publisher.engine.shape.nodes[0] or node == pull.worker.node:
                continue
            if not pull.kernels.is_done:
                continue  # its client has not sent it
            # Nor does it while the rank's home does not take it back.
            homes = {pull.worker.node, pull.worker.engine.shape.nodes[0]}
            daemons = {("daemon", home) for home in homes}
            link = frozenset(self._world.host_of(home) for home in homes)
            self._world.expectations.expect(
                Check.SILENT,
                f"{node} is gone, and the pull of {pull.worker.name} of {pull.transfer.transfer_id} goes on",
                (pull.worker.process, *daemons, link),
                REFUSED_S,
                lambda pull=pull: bool(pull.ended) or is_excused(pull),
            )

    def _is_past_deadline(self, pull: Pull) -> bool:
        return self._world.kernel.now >= pull.deadline - 1e-3

    def _has_ended_pull(self, pull: Pull) -> bool:
        return pull.is_cancelled or pull.worker.is_suspending or bool(pull.transfer.abandoned)

    def _may_be_busy(self, pull: Pull) -> bool:
        # Or it has no descriptors, or messages with block ids were lost.
        return self._world.traits.may_be_busy or self._is_any_struck(pull)

    def _is_daemon_struck(self, pull: Pull) -> bool:
        return self.is_struck(pull.began - SHORTLY_S, self._own_parties(pull))

    def _is_any_struck(self, pull: Pull) -> bool:
        return self.is_struck(pull.began - SHORTLY_S, self._parties(pull))

    def _is_withdrawn(self, pull: Pull) -> bool:
        return pull.transfer.is_withdrawn

    # --- releases

    def check_released(self, worker: Worker, transfer: Transfer, why: Code) -> None:
        """A transfer is released for a reason that there is; `Worker` checks its readers."""
        now = self._world.kernel.now
        life = transfer.published_at - SHORTLY_S
        processes = [worker.process for worker in transfer.workers]
        daemons = [("daemon", worker.node) for worker in transfer.workers]
        nodes = {worker.node for worker in transfer.workers}
        links = [frozenset((self._world.host_of(a), self._world.host_of(b))) for a in nodes for b in nodes]
        match why:
            case Code.LEASE_EXPIRED:
                # The client ends it by itself where its daemon is gone; never before its time.
                is_so = now >= transfer.published_at + transfer.lease_s - LEASE_SLACK_S
            case Code.UNPUBLISHED:
                is_so = transfer.is_withdrawn
            case Code.PUBLISHER_GONE | Code.RANK_LOST | Code.SUSPENDED | Code.DAEMON_LOST | Code.RELEASED:
                is_so = self.is_struck(life, {*processes, *daemons, *links})
            case Code.CANCELLED:
                is_so = transfer.is_cancelled
            case Code.BUSY:
                is_so = transfer.added_at > 0.0 and self._world.traits.may_be_busy
            case _:
                is_so = why in (Code.COMPLETED, Code.ABANDONED)
        if not is_so:
            text = f"{transfer.transfer_id} of {worker.name} is released as {why}, and is not"
            self._world.violate(Check.RELEASE_REASON, text)


# What must have happened where a pull fails with a code.
_NEEDS: dict[Code, Callable[[Reasons, Pull], bool]] = {
    Code.DEADLINE: Reasons._is_past_deadline,
    Code.CANCELLED: Reasons._has_ended_pull,
    Code.BUSY: Reasons._may_be_busy,
    Code.DAEMON_LOST: Reasons._is_daemon_struck,
    Code.UNPUBLISHED: Reasons._is_withdrawn,
    Code.DRAINING: Reasons._is_any_struck,
}
