"""One process of an engine: what it publishes and pulls by the client's API, and what must come of it."""

from __future__ import annotations

import math
import select
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar

from kvxferd import client, resident
from kvxferd.client.publishes import RETRIED_ON_REPLAY
from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import EngineId, Generation, Rank, TransferId
from kvxferd.layout import EngineSpec, GroupKind, RankLayout
from kvxferd.mover.chunks import slices
from tests.simulation.checks import Check
from tests.simulation.contents import Lists, least_reads
from tests.simulation.fabric import Pace, SimTransport
from tests.simulation.history import End
from tests.simulation.kernel import Process, Task
from tests.simulation.operators import Operator
from tests.simulation.reasons import OF_LIARS, OF_LIARS_PUBLISH
from tests.simulation.safety import posts_into, writers_of
from tests.simulation.shapes import RankShape, draw_request, first_piece, own_lists
from tests.simulation.store import WITH_GPU, MemoryKind, Store, contents_of
from tests.simulation.transfers import (
    LATE_REGISTER_S,
    LEASE_S,
    REGISTER_S,
    Kernels,
    Pull,
    Transfer,
    Wanted,
    ids_of,
)

if TYPE_CHECKING:
    from tests.simulation.engine import Engine

T = TypeVar("T")

MAX_ATTEMPTS = 3
PATIENT_S = 10.0
MAX_DRAWS = 100  # of blocks: a list of a window may need more than there are, or few
RETRY_S = 0.2
DISOWN_EVERY_S = 3.0
BACK_S = 2.0  # by then clients have registered with a restarted daemon
RELEASE_HEARD_S = 14.0  # a home knows the ranks of a restarted node within 12
COMPLETED_S = 14.0
SOON_S = 0.5  # each of these where no fault shows: four times the most of 1,500 faults
OWN_RELEASE_S = 1.0
DOUBT_S, DOUBT_SOON_S = 30.0, 8.0  # `quiesce_s`, and three seconds
SUSPEND_S = 8.0
CANCEL_S = 4.0
STAGED_S = 10.0  # after which a staged source that does not reply is gone
CLIENT_GRACE_S = 0.5  # `client.pulls.DEADLINE_GRACE_S`: the client's own timer
LAST_WORD_S = 1 / 16  # after its deadline, in which a mover may say that a pull is over
DEADLINES_S = (0.5, 3.0, 6.0, 12.0, 60.0)
DAEMON_GRACE_S = 0.1  # after a deadline, for the daemon's word to come
TWO_TRIPS_S = 0.25
KERNELS_S = (0.0, 0.001, 0.02, 0.3)
FEW_READERS = {"acknowledged", "core.source.transfer_table MAX_READERS"}  # of `LOW_NUMBERS`
IN_PARTS = "resident.thread_mover MAX_RUNS_AT_ONCE"  # between which runs are not joined
MORE_POSTS = {
    IN_PARTS, "mover.chunks.slices MAX_DESCRIPTORS", "mover.chunks.slices MAX_RUN_BYTES",
    "mover.reads.pull_engine SliceBudget",
}  # fmt: skip
LOW_LIMIT = 3  # of an engine's transfers, and of a rank's pulls, where limits are low
PIECE_S = 0.9  # within which a pull at rest has read a first piece
REFUSED_S = 3.0  # within which what is too much has been refused
SHORT_S, SHORT_SHARE = 0.002, 0.15  # that some calls wait for their daemon

_TRACE = f"{7:032x}-{5:016x}"
# Headers of requests' traces, with what references have of them.
TRACES = {
    "": "", f"00-{_TRACE}-01": f"00-{_TRACE}-01", f"00-{_TRACE}-02": f"00-{_TRACE}-00",
    f"cc-{_TRACE}-01-{'m' * 456}": f"00-{_TRACE}-01", f"cc-{_TRACE}-01-{'m' * 457}": "",
    f"ff-{_TRACE}-01": "", f"00-{_TRACE}-01-more": "", f"00-{0:032x}-{5:016x}-01": "",
    f"00-{7:032x}-{0:016x}-01": "",
}  # fmt: skip


class Worker:
    """One process of an engine: a rank, or a scheduler, which has no memory."""

    def __init__(
        self,
        engine: Engine,
        role: str,
        node: str,
        spec: EngineSpec | None = None,
        shape: RankShape | None = None,
    ) -> None:
        self.engine, self.world, self.node = engine, engine.world, node
        self.spec, self.shape = spec, shape
        self.generation = engine.generation
        self.transfers = engine.by_id  # of its generation
        self.name = f"{engine.shape.name}.{engine.life}/{role}"
        self.store: Store | None = None
        self.graves: list[Store] = []  # memory that it has given back
        self.handle: client.RankHandle | client.Publisher | None = None
        self.is_suspending = self.is_suspended = self.is_leaving = False
        self.pulls: dict[int, Pull] = {}  # by ticket, those that have not ended or are in doubt
        self.answers: dict[int | str, list[object]] = {}  # to wrong calls: the codes of their ends
        self._commands: deque[Callable[[], None]] = deque()
        self._task: Task | None = None
        self.stream_ends = 0.0  # when its GPU has done what was launched
        self._connected_at = 0.0  # since when a daemon takes its requests
        self._disowned_at = 0.0  # when an operator last freed its engine's name
        self._polled_at = 0.0  # what it hears next has come since then
        self._num_fds = 0  # that it had before it had a session
        self.process: Process = self.world.kernel.spawn(self.name, self._run, uid=engine.shape.uid)
        self.process.on_death.append(self._died)
        self.world.expectations.disturb(0.0, self)
        self.expect_registered(lambda: self.handle is not None)

    # --- from outside

    @property
    def is_alive(self) -> bool:
        """Whether the process is there."""
        return not self.process.is_dead

    @property
    def is_ready(self) -> bool:
        """Whether it may be called."""
        return (
            self.is_alive
            and not self.process.is_stopped
            and self.handle is not None
            and not (self.is_suspending or self.is_suspended)
        )

    def do(self, act: Callable[[], None]) -> None:
        """Have the process do something."""
        self._commands.append(act)
        if self._task is not None:
            self.world.kernel.notify(self._task)

    def kill(self) -> None:
        """Kill the process."""
        self.world.kernel.kill(self.process)

    def leave(self) -> None:
        """Close the session, and end."""
        if self.handle is not None:
            self.tell("leaves")
            self.is_leaving = True
            self.world.kernel.on_strike(self.process)
            for pull in self.pulls.values():
                pull.is_cancelled = True
            closed: list[bool] = []
            self.handle.call_at_close(lambda: closed.append(True))
            self.handle.close()
            for event in self.handle.poll():
                self._handle(event)
            if going_on := [ticket for ticket, pull in self.pulls.items() if not pull.ended]:
                text = f"{self.name} has closed its session, and pulls {going_on} go on"
                self.world.violate(Check.CANCELLED, text)
            own = [one for one in self.transfers.values() if one.publisher is self and one.ref is not None]
            if kept := [one.transfer_id for one in own if not one.is_over]:
                text = f"{self.name} has closed its session, and does not hear that {kept} are released"
                self.world.violate(Check.RELEASE_HEARD, text)
            self._check_refuses(Code.CANCELLED)
            if not closed:
                self.world.violate(Check.REST, f"{self.name} is not called as its session closes")
            self._check_closed()
        self.kill()

    def _check_refuses(self, code: Code) -> None:
        """A session that is over takes no call; one of a rank that sleeps none that needs its memory."""
        rank: Any = self.handle
        ref = client.make_ref(self.world.endpoint_of(self.node), "nobody", "g0", "late")
        calls: list[Callable[[], object]] = [
            lambda: rank.publish("late", {}, 1),
            lambda: rank.add_blocks("late", {}),
        ]
        if self.spec is not None:
            calls += [lambda: rank.ready("late"), lambda: rank.pull(ref, {}, 1, 1.0)]
        if code is not Code.SUSPENDED:
            calls += [lambda: rank.unpublish(ref), lambda: rank.reference("late")]
            if self.store is not None:
                regions = self.store.regions
                calls += [lambda: rank.prepare(ref), lambda: rank.abandon(ref), rank.suspend]
                calls.append(lambda: rank.resume(regions))
        for number, call in enumerate(calls):
            try:
                call()
                found = None
            except KvxferdError as error:
                found = error.code
            if found is not code:
                self.world.violate(
                    Check.REFUSED, f"call {number} of {self.name} is refused as {found}, not {code}"
                )

    def _check_closed(self) -> None:
        """A closed session has given all of its descriptors back."""
        held = sum(store.num_fds for store in (self.store, *self.graves) if store is not None)
        left = self.world.num_fds() - self._num_fds - held
        what = f"{self.name} has closed its session"
        if self.engine.shape.memory is not MemoryKind.RESIDENT:
            if left > 0:
                self.world.violate(Check.REST, f"{what}, and holds {left} descriptors")
            return
        is_struck = not self.world.fabric.is_hurried or any(
            p.transfer.is_of_liar for p in self.pulls.values()
        )
        if not is_struck and getattr(self.handle, "memory_in_use", False):
            self.world.violate(Check.FREED, f"{what}, and its memory is in use")

    def tell(self, what: str) -> None:
        """Add to the episode's story."""
        self.world.tell(self.name, what)

    def describe(self) -> str:
        """Return what it is at, for people."""
        where = f"{self.name} at {self.node}: ready={self.is_ready}"
        return f"{where} connected={self.is_connected} pulls={len(self.pulls)}"

    def check_memory(self) -> None:
        """Whether nobody else has written."""
        for store in [*self.graves, *([self.store] if self.store is not None else [])]:
            if changed := store.num_changed():
                check = Check.FREED if store.is_freed else Check.UNTOUCHED
                self.world.violate(check, f"{changed} bytes of {self.name} were written by somebody else")

    def _died(self) -> None:
        self.tell("dies")
        self.world.expectations.disturb(0.0, self, self.node)
        self.world.unsure_counts.add(self.node)
        for pull in self.pulls.values():
            self.world.open_pulls.pop(pull, None)

    @property
    def _is_slow(self) -> bool:
        """Whether its node's daemon may not register it at once, for its home or a former daemon's movers."""
        is_alone = len({*self.engine.shape.nodes}) == 1 and self.world.is_at_rest
        return not is_alone or self.world.traits.has_few_starts

    def expect_registered(self, is_so: Callable[[], bool]) -> None:
        """A daemon takes its requests, as `is_so` shows."""
        if "owned_ranks" in self.world.traits.low_numbers:
            return  # what is forgotten of its former ranks may leave its name to another node's for long
        self.world.expectations.expect(
            Check.REGISTERED,
            f"{self.name} is not registered",
            (self, *self.world.node_names),
            LATE_REGISTER_S if self._is_slow else REGISTER_S,
            lambda: is_so() or not self.is_alive,
        )

    # --- the process

    def _run(self) -> None:
        self._task = self.world.kernel.current
        self._num_fds = self.world.num_fds()
        while not self._register():
            self.world.kernel.sleep(RETRY_S)
        self.tell("is registered")
        while True:
            assert self.handle is not None
            while self._commands:
                self._commands.popleft()()
            is_connected = self.handle.is_connected
            for event in self.handle.poll():
                self._handle(event)
            self._polled_at = self.world.kernel.now
            if not is_connected:
                self._connected_at = self._polled_at
                self._check_none_withdrawn()
            self.check_memory()
            if not self._commands:
                self.world.kernel.wait(((self.handle.fileno(), select.EPOLLIN),), None)

    def _within(self, timeout_s: float, call: Callable[[float], T]) -> T:
        """Make a call that waits: it returns soon, as its daemon replies, not as the time is over.

        Some have too little, but none of a first life: the movers that serve the engines are counted then.
        """
        began, is_first = self.world.kernel.now, self.engine.life == 1
        is_short = not is_first and self.world.rng.random() < SHORT_SHARE
        made = call(SHORT_S if is_short else timeout_s)
        parties = {self, self.node, self.process, ("daemon", self.node)}
        is_struck = self.world.reasons.is_struck(began, parties)
        soon_s = timeout_s if self._is_slow else REGISTER_S
        if self.world.kernel.now >= began + soon_s and not is_short and not is_struck:
            self.world.violate(Check.REGISTERED, f"a call of {self.name} returns after {soon_s:g} s")
        return made

    def _register(self) -> bool:
        path = self.world.socket_of(self.node)
        try:
            connected = self._within(5.0, lambda s: client.connect(path, timeout_s=s, name=self.name))
        except (KvxferdError, OSError) as error:
            self.tell(f"is not connected: {error}")
            return False
        try:
            if self.spec is None:
                attach = partial(connected.attach, self.engine.shape.name, self.generation)
                self.handle = self._within(5.0, attach)
            else:
                assert self.shape is not None
                self.store = self._new_store()
                register = partial(
                    self.register_rank, connected, self.spec, self.shape.layout, self.store.regions
                )
                self.handle = self._within(10.0, register)
        except (KvxferdError, OSError) as error:
            self.tell(f"is not registered: {error}")
            self._check_refused(error)
            self._obey_refusal(error)
            connected.close()
            if self.store is not None:  # a mover that the daemon had bound may have it for a while
                self.graves.append(self.store)
                self.store = None
            return False
        return True

    def _check_refused(self, error: KvxferdError | OSError) -> None:
        """An engine of one node is refused only for what may change: its name is nobody else's."""
        of_liars = OF_LIARS - {Code.BAD_FRAME}  # of one that is cut off
        if getattr(error, "code", None) in of_liars and len({*self.engine.shape.nodes}) == 1:
            self.world.violate(Check.REGISTERED, f"{self.name} is refused: {error}")

    def _obey_refusal(self, error: KvxferdError | OSError) -> None:
        """Have the operator free the engine's name, where a refusal says so: its former nodes may be gone."""
        now, name = self.world.kernel.now, self.engine.shape.name
        if f"`kvxferd disown {name}`" in str(error) and now >= self._disowned_at + DISOWN_EVERY_S:
            self._disowned_at = now
            Operator(self.world).post(self.node, f"/v1/engines/disown?engine_id={name}")

    def _new_store(self) -> Store:
        assert self.shape is not None
        return Store(self.shape, self.engine.shape.memory)

    def register_rank(
        self, connected: client.Client, spec: EngineSpec, layout: RankLayout, regions: Any, timeout_s: float
    ) -> client.RankHandle:
        """Register a rank with memory of this one's kind."""
        make_transport = partial(SimTransport, self.world.fabric, is_resident=True)
        return resident.register(connected, spec, layout, regions, timeout_s, make_transport)

    # --- as a source

    def publish(self, transfer: Transfer) -> None:
        """Write a transfer on every rank, and publish it."""
        engine, shape = self.engine, self.engine.shape
        if not self.is_ready:
            engine.forget(transfer)
            return
        assert self.handle is not None
        begins_with, *steps = transfer.steps
        kernels = self._write_on_all(transfer, 0, begins_with)
        trace, nonce = self.world.rng.choice([*TRACES]), f"{self.world.rng.getrandbits(128):032x}"
        try:
            announced = self.handle.reference(transfer.transfer_id, nonce)
            transfer.ref = self.handle.publish(
                transfer.transfer_id,
                transfer.parts[0],
                transfer.num_tokens,
                num_readers=transfer.num_readers,
                lease_s=None if transfer.lease_s == LEASE_S else transfer.lease_s,
                after=kernels,
                traceparent=trace,
                ready_tokens=begins_with if steps else None,
                nonce=nonce if transfer.number % 2 else None,
            )
        except KvxferdError as error:
            self.tell(f"cannot publish {transfer.transfer_id}: {error}")
            engine.forget(transfer)
            return
        transfer.published_at = self.world.kernel.now
        if transfer.ref.traceparent != TRACES[trace]:
            self.world.violate(Check.PUBLISHED, f"{transfer.ref} has the trace {trace!r}")
        if (transfer.ref == announced) is not bool(transfer.number % 2):
            self.world.violate(Check.PUBLISHED, f"{transfer.ref} was announced as {announced}")
        self.tell(f"publishes {transfer.transfer_id}, {transfer.steps} tokens in {_text_of(transfer.lists)}")
        self._expect_release(transfer)
        of_engine = [one for one in self.transfers.values() if one.ref is not None]

        def num_held() -> int:
            # What a client has published to a daemon before, it tries until there is room.
            since = self.world.started_at(self.node)
            return sum(not one.is_over and one.published_at > since for one in of_engine)

        self._expect_few("transfers", num_held)
        if not steps:
            self._has_reported(transfer)
        elif self.spec is None:
            transfer.is_listed = False
            self.add_later(transfer, 1)
        for worker in transfer.workers if shape.says_ready else [self]:
            if worker.store is not None:
                worker.report_later(transfer, int(worker is self))

    def _write_on_all(self, transfer: Transfer, start: int, step: int) -> Kernels:
        """Write tokens on this rank; on all, where this one reports for them. Return this one's kernels."""
        kernels = Kernels()
        end = None if step == transfer.num_tokens else step
        for worker in transfer.workers:
            if worker.store is not None and (worker is self or not self.engine.shape.says_ready):
                done = kernels if worker is self else Kernels()
                worker.launch(worker is self, done, worker.write, transfer, start, end)
        if self.store is None:
            kernels.is_done = True
        return kernels

    def launch(self, is_later: bool, kernels: Kernels, act: Callable[..., None], *arguments: object) -> None:
        """Have this rank's GPU do something behind what it does already: now, or some time later."""
        world = self.world

        def run() -> None:
            kernels.is_done = True
            act(*arguments)

        if is_later and self.engine.shape.has_gpu and not world.fabric.is_hurried:
            self.stream_ends = max(self.stream_ends, world.kernel.now) + world.rng.choice(KERNELS_S)
        if self.stream_ends > world.kernel.now:
            world.kernel.at(self.stream_ends, run)
        else:
            run()

    def write(self, transfer: Transfer, start: int, end: int | None) -> None:
        """Write tokens of a transfer."""
        if self.store is not None and not transfer.is_over and self.is_alive and self not in transfer.freed:
            self.store.write(transfer.lists, transfer.number, start, end)

    def add_later(self, transfer: Transfer, number: int) -> None:
        """Have a scheduler list the next blocks of a transfer some time later."""
        self.world.after(
            self.world.rng.choice((0.001, 0.01, 0.1, 0.3)), self.do, lambda: self.add(transfer, number)
        )

    def add(self, transfer: Transfer, number: int) -> None:
        """List the blocks of a step."""
        if transfer.is_over or not self.is_ready:
            return
        assert self.handle is not None
        self._extends(transfer)
        try:
            if transfer.parts[number]:
                self.handle.add_blocks(transfer.transfer_id, transfer.parts[number])
        except KvxferdError as error:
            self.tell(f"cannot add to {transfer.transfer_id}: {error}")
            return
        transfer.added_at = self.world.kernel.now
        self.tell(f"adds {_text_of(transfer.parts[number])} to {transfer.transfer_id}")
        if number + 1 < len(transfer.steps):
            self.add_later(transfer, number + 1)
        else:
            transfer.is_listed = True
            self._look_whether_whole(transfer)

    def _extends(self, transfer: Transfer) -> None:
        if self.world.planned_at_extend:
            self.world.planned_at_extend.pop(0)(transfer)

    def report_later(self, transfer: Transfer, number: int) -> None:
        """Write the next tokens of a transfer some time later, and report it."""
        if number < len(transfer.steps):
            delays_s = (0.001, 0.01, 0.1, 0.3) if len(transfer.steps) > 1 else (0.0, 0.001, 0.02)
            delay_s = self.world.rng.choice(delays_s)
            if number == len(transfer.steps) - 1:
                delay_s = transfer.last_step_s or delay_s
            self.world.after(delay_s, self.do, lambda: self.report(transfer, number))

    def report(self, transfer: Transfer, number: int) -> None:
        """Write the tokens of a step, and report it."""
        if transfer.is_over or not self.is_ready:
            return
        self._check_unread(transfer)
        if transfer.last_step_s and number == len(transfer.steps) - 1:
            self._check_read_early(transfer)
        step = transfer.steps[number]
        kernels = self._write_on_all(transfer, transfer.steps[number - 1] if number else 0, step)
        is_publisher = self is transfer.publisher
        assert isinstance(self.handle, client.RankHandle)
        parts = transfer.parts[number] if is_publisher else {}
        if parts:
            self._extends(transfer)
        try:
            if parts and self.world.rng.random() < 0.3:
                self.handle.add_blocks(transfer.transfer_id, parts)
                parts = {}
            self.handle.ready(
                transfer.transfer_id,
                None if number == len(transfer.steps) - 1 and not self._counts_tokens(transfer) else step,
                parts or None,
                after=kernels,
            )
        except KvxferdError as error:
            self.tell(f"cannot report {transfer.transfer_id}: {error}")
            return
        transfer.added_at = self.world.kernel.now if is_publisher else transfer.added_at
        self.tell(f"has written {step} tokens of {transfer.transfer_id}")
        if number == len(transfer.steps) - 1:
            self._has_reported(transfer)
        self.report_later(transfer, number + 1)

    def _counts_tokens(self, transfer: Transfer) -> bool:
        """Whether this one's last report says how many tokens there are, as of full attention it may."""
        groups = self.engine.shape.deployment.groups.values()
        is_full = all(one.kind is GroupKind.ATTENTION and one.sliding_window is None for one in groups)
        return is_full and transfer.number % 2 == 0

    def _check_unread(self, transfer: Transfer) -> None:
        """Before this rank reports more, only progressive pulls have read."""
        for pull in transfer.pulls:
            store, may_read = pull.worker.store, pull.is_progressive or pull.ended or transfer.is_of_liar
            if store is not None and not may_read and store.is_written(pull.lists):
                text = f"the pull of {pull.worker.name} of {transfer.transfer_id} has read before {self.name}"
                self.world.violate(Check.NOT_WHOLE, f"{text} has written all")

    def _check_read_early(self, transfer: Transfer) -> None:
        """Before this rank reports the last step, progressive pulls have read of those before."""
        steps = [step for step in transfer.steps[:-1] if step] or [0]
        # Usually what comes behind a step that is no piece is too small for one, too.
        takes_small = "core.sink.pull MIN_PIECE_BYTES" in self.world.traits.small_numbers
        known = steps[-1 if takes_small else 0]
        if self.world.traits.defers_little:
            return  # a manifest may be refused, and is asked for again after two seconds
        since = self.world.kernel.now - PIECE_S
        if any(self.world.was_away(one.node, since - BACK_S) for one in transfer.workers):
            return  # its ranks may have come back since
        for pull in transfer.pulls:
            worker = pull.worker
            if not pull.is_progressive or pull.ended or pull.began > since or worker.store is None:
                continue
            assert worker.shape is not None
            wanted = first_piece(worker.shape.layout, pull.lists)
            if 0 < wanted <= known and not worker.store.is_written(pull.lists):
                text = f"the pull of {worker.name} of {transfer.transfer_id} has read nothing"
                self.world.violate(Check.PROGRESS, f"{text}, and {known} tokens are written")

    def report_early(self) -> None:
        """Report a transfer that is never published."""
        if self.engine.shape.says_ready and self.is_ready and isinstance(self.handle, client.RankHandle):
            self.handle.ready(f"early{self.world.take_number()}")

    def report_again(self, transfer: Transfer) -> None:
        """Report that nothing is written of a transfer, again and again until it is over."""
        if self.engine.shape.says_ready and self.is_ready and not transfer.is_over:
            assert isinstance(self.handle, client.RankHandle)
            self.handle.ready(transfer.transfer_id, 0)
            self.world.after(1.0, self.do, partial(self.report_again, transfer))

    def _has_reported(self, transfer: Transfer) -> None:
        """This rank has said that it has written all: for all ranks, where they say nothing."""
        transfer.reported |= {self} if self.engine.shape.says_ready else set(transfer.workers)
        self._look_whether_whole(transfer)

    def _look_whether_whole(self, transfer: Transfer) -> None:
        writers = {worker for worker in transfer.workers if worker.store is not None}
        if transfer.is_listed and transfer.reported >= writers:
            ended = max(worker.stream_ends for worker in transfer.workers)
            reasons, now = self.world.reasons, self.world.kernel.now
            self.world.kernel.at(max(ended, now), lambda: reasons.transfer_is_whole(transfer))

    def unpublish(self, transfer: Transfer) -> None:
        """Withdraw a transfer."""
        if transfer.ref is None or not self.is_ready:
            return
        assert self.handle is not None
        transfer.is_unheard |= not self.handle.is_connected
        transfer.is_withdrawn = True
        self.handle.unpublish(transfer.ref)
        self.tell(f"unpublishes {transfer.transfer_id}")
        self.expect_withdrawn(transfer)

    def _check_none_withdrawn(self) -> None:
        """A client that has no daemon has itself released what its engine has withdrawn."""
        for one in self.transfers.values():
            is_own = one.publisher is self and one.is_withdrawn and not one.is_cancelled
            if is_own and not one.is_over:
                text = f"{one.transfer_id} of {self.name} is withdrawn, and lives on without a daemon"
                self.world.violate(Check.WITHDRAWN, text)

    def expect_withdrawn(self, transfer: Transfer) -> None:
        """A transfer that is withdrawn ends."""
        self.world.expectations.expect(
            Check.WITHDRAWN,
            f"{transfer.transfer_id} of {self.name} is withdrawn, and lives",
            (self, *self.world.node_names),
            RELEASE_HEARD_S,
            lambda: transfer.is_over or not self.is_alive,
            SOON_S,
        )

    def republish(self, transfer: Transfer) -> None:
        """Publish another request by an id that is used, which the client refuses.

        The id of a refused publish is not used.
        """
        if not self.is_ready or "client.publishes MAX_USED_IDS" in self.world.traits.low_numbers:
            return
        assert self.handle is not None
        for event in self.handle.poll():
            self._handle(event)
        if transfer.refused is not None:
            return
        try:
            self.handle.publish(transfer.transfer_id, transfer.parts[0], transfer.num_tokens)
        except KvxferdError as error:
            self.tell(f"cannot publish {transfer.transfer_id} again: {error}")
            return
        self.world.violate(Check.ID_ONCE, f"{transfer.transfer_id} of {self.name} is published twice")

    def _expect_release(self, transfer: Transfer) -> None:
        """A transfer that nobody reads any more is released once its lease is over."""

        def is_met() -> bool:
            return transfer.is_over or not self.is_alive

        def look() -> None:
            now = self.world.kernel.now
            if is_met() or transfer.is_of_liar:
                return
            if transfer.is_prepared(now) or any(not pull.ended for pull in transfer.pulls):
                self.world.after(1.0, look)
                return
            began = max(transfer.published_at, transfer.added_at, *transfer.prepared.values())
            # Whoever reads it holds it by a lease of the daemon's. As a grant is returned, its own runs anew.
            until = transfer.last_read + LEASE_S, transfer.last_returned + transfer.lease_s
            left_s = max(began + transfer.lease_s, *until) - now
            if self.world.daemons[self.node].is_dead:
                self._expect_own_release(transfer)
            if left_s > 0:
                self.world.after(left_s + 0.001, look)
                return
            nodes = tuple(self.world.node_names)
            text = f"{transfer.transfer_id} of {self.engine.reader} is not released after its lease"
            within_s = max(LEASE_S, transfer.lease_s) + 4.0  # it runs anew as a rank dies that reads it
            self.world.expectations.expect(Check.LEASE, text, (self, *nodes), within_s, is_met, SOON_S)

        self.world.after(transfer.lease_s, look)

    @property
    def is_connected(self) -> bool:
        """Whether a daemon takes its requests."""
        return self.handle is not None and self.handle.is_connected

    @property
    def _is_newly_connected(self) -> bool:
        """Whether what it has asked for may wait for a daemon to take it."""
        return not self.is_connected or self.world.kernel.now < self._connected_at + REFUSED_S

    def _expect_few(self, what: str, count: Callable[[], int]) -> None:
        """Of what this process has asked for too much is refused, once its GPU has let it be sent."""
        if not self.world.traits.has_low_limits:
            return
        expect = partial(
            self.world.expectations.expect,
            Check.LIMIT,
            f"{self.name} has more {what} than {LOW_LIMIT}",
            (self, *self.world.node_names),
            REFUSED_S,
            lambda: count() <= LOW_LIMIT or not self.is_alive or self._is_newly_connected,
        )
        self.world.kernel.at(max(self.stream_ends, self.world.kernel.now), expect)

    def _expect_own_release(self, transfer: Transfer) -> None:
        """Without a daemon a client ends the leases by itself: nobody prolongs them."""

        began = max(transfer.published_at, transfer.added_at)

        def is_met() -> bool:
            is_longer = transfer.added_at > began
            has_daemon = not self.world.daemons[self.node].is_dead
            return transfer.is_over or not self.is_alive or has_daemon or is_longer

        left_s = max(0.0, began + transfer.lease_s - self.world.kernel.now)
        text = f"{transfer.transfer_id} of {self.name} outlives its lease, and there is no daemon"
        self.world.expectations.expect(Check.LEASE, text, (self,), left_s + OWN_RELEASE_S, is_met)

    def _has_heard(self, transfer: Transfer) -> bool:
        """Whether its daemon has told this rank already, and knows that it has."""
        forgets = "core.ranks.member MAX_RELEASED" in self.world.traits.low_numbers
        return not forgets and transfer.released_at.get(self, 0.0) > self.world.started_at(self.node)

    def _released(self, transfer_id: str, why: Code, refusal: str = "") -> None:
        """A transfer is over. Where its publisher hears so, every rank may use the blocks again."""
        transfer = self.transfers.get(transfer_id)
        if transfer is None:
            return
        if refusal:
            transfer.refused = why
            # It may be the former daemon's last word, as long as the client has not been without one.
            has_new_daemon = self._connected_at > self.world.started_at(self.node) > transfer.published_at
            is_replayed = has_new_daemon and not transfer.is_withdrawn
            if why in OF_LIARS_PUBLISH or (is_replayed and why in RETRIED_ON_REPLAY):
                self.world.violate(Check.PUBLISHED, f"{transfer_id} of {self.name} is refused: {refusal}")
        elif self._has_heard(transfer):
            self.world.violate(Check.RELEASED_ONCE, f"{self.name} hears twice that {transfer_id} is released")
        name = EngineId(self.engine.shape.name), Generation(self.generation), TransferId(transfer_id)
        if (agent := self.world.words.holder_of(name)) is not None:
            text = f"{self.name} hears that {transfer_id} is over, and its fence word stands at {agent}"
            self.world.violate(Check.WORD_FIRST, text)
        is_first = not transfer.released
        # Its own client may have ended it before any daemon had it.
        is_fresh = self.world.kernel.now < max(transfer.published_at, transfer.publisher.stream_ends) + 0.05
        transfer.is_unheard |= is_first and is_fresh
        transfer.released[self] = why
        transfer.released_at[self] = self._polled_at
        if not refusal:
            self.world.heard[self.node].released(self.engine.shape.name, transfer_id, why)
            self.world.reasons.check_released(self, transfer, why)
        if why in (Code.COMPLETED, Code.ABANDONED) and not transfer.is_of_liar:
            self._check_readers(transfer, why)
        # A process that has come in the place of one of them never had its blocks.
        over = transfer.workers if self is transfer.publisher else [self] if self in transfer.workers else []
        for worker in over:
            if worker.store is not None and worker not in transfer.freed:
                worker.check_memory()
                worker.store.take_back(transfer.lists)
            transfer.freed.add(worker)  # also of one that sleeps: it wakes with other memory
        if self is transfer.publisher:
            self.engine.forget(transfer)
        if is_first and not refusal:
            for worker in transfer.workers:
                self._expect_heard(transfer, worker)

    def _expect_heard(self, transfer: Transfer, worker: Worker) -> None:
        """A rank hears of a release, unless a daemon was restarted that knew that it should."""
        world = self.world
        nodes = (worker.node, transfer.publisher.node, self.engine.shape.nodes[0])

        # One whose connection was cut may have been away.
        was_struck = world.reasons.is_struck(
            world.kernel.now - RELEASE_HEARD_S, {worker.process, ("daemon", worker.node)}
        )

        def has_heard() -> bool:
            # A home knows the ranks of another node some time after either daemon was started, and its own
            # once they have registered again: one that comes after the release is not told.
            since = transfer.published_at - (RELEASE_HEARD_S if worker.node != nodes[2] else BACK_S)
            is_unheard = transfer.is_unheard or was_struck
            is_excused = is_unheard or any(world.started_at(node) > since for node in nodes)
            return worker in transfer.released or not worker.is_ready or is_excused

        text = f"{worker.name} does not hear that {transfer.transfer_id} is released"
        world.expectations.expect(
            Check.RELEASE_HEARD, text, (worker, *world.node_names), RELEASE_HEARD_S, has_heard, SOON_S
        )

    def _check_readers(self, transfer: Transfer, why: Code) -> None:
        """Readers are the reason of a release only where they are done, or are about to hear so."""

        def is_true() -> bool:
            sure = transfer.num_done()
            dead = sum(not any(w.is_alive for w in workers) for workers in self._reading(transfer).values())
            # Of a pull that reads nothing its daemon alone knows that it is delivered.
            is_empty = any(not ids_of([pull.lists]) for pull in transfer.pulls)
            # A known defect: a daemon that stood still past a deadline takes the mover's later word, and
            # acknowledges what its client had given up.
            is_given_up = any(pull.is_given_up for pull in transfer.pulls)
            return sure + dead >= transfer.num_readers or is_empty or is_given_up

        self.world.expectations.expect(
            Check.RELEASE_REASON,
            f"{transfer.transfer_id} of {self.name} is released as {why}, and its readers are not done",
            tuple(self.world.node_names),
            DOUBT_S,
            is_true,
            SOON_S,
        )

    @staticmethod
    def _reading(transfer: Transfer) -> dict[str, set[Worker]]:
        found: dict[str, set[Worker]] = {}
        for pull in transfer.pulls:
            worker = pull.worker
            found.setdefault(f"{worker.engine.shape.name} {worker.generation}", set()).add(worker)
        return found

    # --- as a sink

    def pull(self, transfer: Transfer, wanted: Wanted, deadline_s: float | None = None) -> None:
        """Pull a transfer into blocks that nobody uses."""
        if transfer.ref is None:
            publisher = transfer.publisher
            is_forgotten = publisher.engine.transfers.get(transfer.transfer_id) is not transfer
            if not transfer.is_over and publisher.is_alive and not is_forgotten:
                delay_s = 0.1 if self.world.fabric.is_hurried else 0.003
                self.world.after(delay_s, self.do, lambda: self.pull(transfer, wanted, deadline_s))
            return
        if not self.is_ready or self.store is None:
            return
        assert self.shape is not None
        world, deployment = self.world, self.engine.shape.deployment
        used = ids_of(pull.lists for pull in self.pulls.values())
        free = [block for block in range(deployment.num_blocks) if block not in used]
        tries = (
            draw_request(self.engine.rng, deployment, transfer.num_tokens, free, is_pull=True)
            for _ in range(MAX_DRAWS)
        )
        if (drawn := next((lists for lists in tries if lists is not None), None)) is None:
            return
        lists = own_lists(self.shape.layout, drawn)
        if deadline_s is None:
            short = world.rng.random() < 0.12
            deadline_s = world.rng.uniform(0.001, 0.05) if short else world.rng.choice(DEADLINES_S)
        share = 0.5 if len(transfer.steps) > 1 else 0.3
        is_progressive = transfer.is_read_early or world.rng.random() < share
        now = world.kernel.now
        pull = Pull(self, transfer, lists, now, deadline_s, is_progressive, wanted, Kernels())
        self.launch(True, pull.kernels, self._lend, pull)
        assert isinstance(self.handle, client.RankHandle)
        try:
            pull.ticket = self.handle.pull(
                transfer.handed_on,
                lists,
                transfer.num_tokens,
                deadline_s,
                after=pull.kernels,
                progressive=pull.is_progressive,
            )
        except KvxferdError as error:
            self.tell(f"cannot pull {transfer.transfer_id}: {error}")
            pull.ended = "refused"
            self.store.take_back(lists)
            return
        if not wanted.attempts and not transfer.is_of_liar:
            world.wanted.append(wanted)
        wanted.attempts += 1
        self.pulls[pull.ticket.number] = pull
        transfer.pulls.append(pull)
        world.open_pulls[pull] = None
        source = transfer.publisher.engine.shape.name
        number = pull.ticket.number
        self.tell(f"pulls {transfer.transfer_id} of {source} into {_text_of(lists)}, {number}")
        self._expect_end(pull)
        asked = list(self.pulls.values())
        self._expect_few("pulls", lambda: sum(not one.ended for one in asked))
        world.pull_started()

    def prepare(self, transfer: Transfer) -> None:
        """Announce a pull."""
        if transfer.ref is not None and self.is_ready:
            assert isinstance(self.handle, client.RankHandle)
            self.handle.prepare(transfer.handed_on, progressive=self.world.rng.random() < 0.5)
            transfer.prepared[self] = self.world.kernel.now
            self.tell(f"prepares {transfer.transfer_id}")

    def _lend(self, pull: Pull) -> None:
        """The last kernel that used a pull's blocks has ended: they may be written."""
        self.world.reasons.expect_ready(pull)
        self.check_memory()
        if not pull.ended and self.store is not None:
            self.store.lend(pull.lists)

    def _expect_end(self, pull: Pull) -> None:
        def look() -> None:
            if pull.ended or not self.is_alive:
                return
            if self.process.is_stopped:
                self.world.after(0.1, look)
                return
            ticket = pull.ticket.number if pull.ticket is not None else 0
            was_calm = self.world.expectations.is_calm(pull.began)  # so its daemon took it at once
            self.world.expectations.expect(
                Check.DEADLINE,
                f"pull {ticket} of {self.name} has not ended",
                (self,),
                CLIENT_GRACE_S + TWO_TRIPS_S,
                lambda: bool(pull.ended) or not self.is_alive or self.is_leaving,
                TWO_TRIPS_S if was_calm else math.inf,
            )

        self.world.kernel.at(pull.ends_by, look)

    def cancel(self, pull: Pull) -> None:
        """Cancel a pull."""
        if pull.ended or pull.ticket is None or not self.is_ready:
            return
        pull.is_cancelled = True
        pull.ticket.cancel()
        self.tell(f"cancels {pull.ticket.number}")
        within_s = CANCEL_S
        if pull.transfer.publisher.engine.shape.memory in WITH_GPU:
            within_s += STAGED_S
        if self.world.traits.pace is Pace.LONG:  # what is posted goes on, at the longest until its deadline
            within_s = max(within_s, pull.ends_by - self.world.kernel.now)
        self.world.expectations.expect(
            Check.CANCELLED,
            f"pull {pull.ticket.number} of {self.name} is cancelled, and does not end",
            # Its reads end no sooner than those whom it reads from go on.
            (self.process, ("daemon", self.node), *pull.transfer.publisher.engine.shape.nodes),
            within_s,
            lambda: bool(pull.ended) or not self.is_alive,
            SOON_S,
        )

    def abandon(self, transfer: Transfer) -> None:
        """Report that no rank of this engine will read a transfer any more."""
        if transfer.ref is None or not self.is_ready:
            return
        assert isinstance(self.handle, client.RankHandle)
        transfer.abandoned.add(f"{self.engine.shape.name} {self.generation}")
        self.handle.abandon(transfer.handed_on)
        self.tell(f"abandons {transfer.transfer_id}")

    # --- sleep

    def suspend(self) -> None:
        """Give the memory back for a while."""
        if not self.is_ready or self.store is None:
            return
        assert isinstance(self.handle, client.RankHandle)
        self.is_suspending = True
        self.world.kernel.on_strike(self.process)
        self.handle.suspend()
        self.tell("is to sleep")
        self.world.expectations.expect(
            Check.SUSPENDS,
            f"{self.name} cannot sleep",
            (self, *self.world.node_names),
            # One that registers sleeps when it has; a home waits for a restarted node's former daemon.
            SUSPEND_S + (RELEASE_HEARD_S if len(set(self.engine.shape.nodes)) > 1 else 0.0),
            lambda: self.is_suspended or not self.is_suspending or not self.is_alive,
            SOON_S,
        )

    def _suspended(self) -> None:
        self.is_suspending, self.is_suspended = False, True
        assert isinstance(self.handle, client.RankHandle)
        if not self.handle.is_suspended or self.handle.memory_in_use:
            self.world.violate(
                Check.SUSPENDED_AFTER, f"{self.name} sleeps, and its handle says that it does not"
            )
        self._check_refuses(Code.CANCELLED if self.is_leaving else Code.SUSPENDED)
        waiting = [pull for pull in self.pulls.values() if not pull.ended]
        if waiting:
            self.world.violate(Check.SUSPENDED_AFTER, f"{self.name} sleeps, and {len(waiting)} pulls go on")
        assert self.store is not None
        if holders := self.world.holders_of(self.store):
            names = [mover.process.name for mover in holders]
            self.world.violate(Check.FREED, f"{self.name} sleeps, and {names} have its memory")
        self.check_memory()
        self.store.free()
        self.graves.append(self.store)
        self.store = None
        for pull in list(self.pulls.values()):
            if pull.ended == "in-doubt" and not pull.is_quiesced:
                pull.transfer.grant_returned(self.world.kernel.now)
            pull.is_quiesced = True  # nobody has the memory
        self.world.after(self.world.rng.choice((0.0005, 0.002, 0.05, 0.5)), self.do, self.resume)

    def resume(self) -> None:
        """Come back with other memory."""
        assert isinstance(self.handle, client.RankHandle)
        try:
            fresh = self._new_store()
        except OSError as error:  # no descriptor is left
            self.tell(f"cannot wake: {error}")
            self.world.after(RETRY_S, self.do, self.resume)
            return
        try:
            self._within(20.0, partial(self.handle.resume, fresh.regions))
        except (KvxferdError, OSError) as error:
            self.tell(f"cannot wake: {error}")
            self._check_refused(error)
            goes_on = getattr(error, "code", None) in (Code.DEADLINE, Code.DAEMON_LOST)
            if not goes_on:
                self.graves.append(fresh)
                self.world.after(RETRY_S, self.do, self.resume)
                return
        if self.handle.is_suspended:
            self.world.violate(
                Check.SUSPENDED_AFTER, f"{self.name} is awake, and its handle says that it sleeps"
            )
        self.store, self.is_suspended = fresh, False
        self.world.kernel.on_strike(self.process)
        self.tell("is awake")

    # --- events

    def _handle(self, event: client.Event) -> None:
        self.tell(_text(event))
        made = getattr(event, "transfer_id", "") or getattr(getattr(event, "ticket", None), "number", "")
        if (answers := self.answers.get(made)) is not None:
            answers.append(event.why if isinstance(event, client.Released) else getattr(event, "code", event))
            if isinstance(event, client.Failed):
                self._note_end(event)
            return
        match event:
            case client.Delivered():
                self._ended(event.ticket.number, "delivered", event)
            case client.Failed():
                self._ended(event.ticket.number, "failed" if event.safe_to_reuse else "in-doubt", event)
            case client.Quiesced():
                self._quiesced(event.ticket.number, event)
            case client.Released():
                self._released(event.transfer_id, event.why)
            case client.PublishRefused():
                self._released(event.transfer_id, event.code, event.message)
            case client.Suspended():
                self._suspended()
            case client.Disconnected():
                self.world.violate(Check.REASON, f"the session of {self.name} ended: {event.message}")

    def _ended(self, ticket: int, how: str, event: client.Delivered | client.Failed) -> None:
        pull = self.pulls.get(ticket)
        if pull is None or pull.ended:
            self.world.violate(Check.ONE_END, f"pull {ticket} of {self.name} ends twice")
            return
        world, now = self.world, self.world.kernel.now
        pull.ended, pull.why = how, getattr(event, "message", "")
        self._check_event(pull, event)
        if "the daemon is silent" in pull.why:
            pull.is_given_up = True
            self.world.unsure_counts.add(self.node)
        # What is prepared later is another pull's; one that its client has failed alone leaves it.
        if how == "delivered" and pull.transfer.prepared.get(self, pull.began) <= pull.began:
            pull.transfer.prepared.pop(self, None)
        world.open_pulls.pop(pull, None)
        pull.transfer.last_read = now
        if how == "failed":
            pull.transfer.grant_returned(now)
        self._note_end(event)
        if isinstance(event, client.Delivered):
            self._check_delivered(pull, event)
            pull.transfer.at_delivery(self)
        else:
            world.reasons.check_failed(pull, event)
        if how == "in-doubt":
            if world.planned_in_doubt:
                world.after(world.rng.choice((0.0, 0.001, 0.1)), world.planned_in_doubt.pop(0), self)
            world.expectations.expect(
                Check.DOUBT,
                f"the blocks of pull {ticket} of {self.name} stay in doubt",
                (self, *world.node_names),
                DOUBT_S,
                lambda: pull.is_quiesced or not self.is_alive,
                DOUBT_SOON_S,
            )
        else:
            self._free(pull)
        wanted, is_hurried = pull.wanted, world.fabric.is_hurried
        # Of ranks that ask together a low limit may let in one after another.
        is_turned_away = isinstance(event, client.Failed) and event.code == Code.BUSY
        more = self.engine.num_ranks if is_hurried and is_turned_away else 0
        is_repeated = wanted.attempts < MAX_ATTEMPTS + more and not pull.transfer.is_pulled_once
        if how != "delivered" and is_repeated and not pull.transfer.is_of_liar:
            # At rest as a patient engine does it: when a busy source has said.
            delay_s = 1.0 if is_hurried else world.rng.choice((0.01, 0.2, 1.0))
            deadline_s = PATIENT_S if is_hurried else None
            world.after(
                delay_s,
                self.do,
                lambda: None if wanted.is_delivered else self.pull(pull.transfer, wanted, deadline_s),
            )

    def _note_end(self, event: client.Delivered | client.Failed) -> None:
        assert self.spec is not None
        rank = Rank(self.spec.pp_rank, self.spec.tp_rank)
        end = End(event.ticket.transfer_id, self.engine.shape.name, rank)
        if isinstance(event, client.Delivered):
            end = end._replace(num_bytes=event.bytes, num_runs=event.runs)
        else:
            end = end._replace(code=event.code)
            # A daemon's sentence says "transfer" before the id.
            if event.message.startswith(f"cannot pull {event.ticket.transfer_id}: "):
                self.world.heard[self.node].of_clients[end] += 1
        self.world.heard[self.node].ends[end] += 1

    def _check_delivered(self, pull: Pull, event: client.Delivered) -> None:
        assert self.store is not None
        ticket = event.ticket.number
        pull.wanted.is_delivered = True
        if self.world.kernel.now >= pull.deadline + LAST_WORD_S - DAEMON_GRACE_S:
            self.world.unsure_counts.add(self.node)  # its daemon may have ended the pull first
        if not pull.kernels.is_done:
            self.world.violate(
                Check.BEFORE_KERNELS, f"pull {ticket} of {self.name} has read into used blocks"
            )
        if pull.transfer.is_of_liar:  # who may never say that it has heard so: then it is not counted yet
            self.world.unsure_counts.add(self.node)
            return
        if wrong := self.store.wrong(pull.lists, pull.transfer.number, pull.transfer.num_tokens):
            self.world.violate(Check.RIGHT_BYTES, f"pull {ticket} of {self.name}: {wrong}")
        self._check_bytes(pull, event)
        reader = f"{self.engine.shape.name} {self.generation}"
        pull.transfer.delivered.setdefault(reader, set()).add(self)
        transfer = pull.transfer
        forgets = bool(FEW_READERS & {*self.world.traits.low_numbers})  # then the lease ends it
        if transfer.num_done() >= transfer.num_readers and not forgets:
            publisher = transfer.publisher
            # Those daemons know who has acknowledged, or has still to: without one the lease ends it. One
            # that is lost has taken along what was on its way.
            nodes = {publisher.engine.shape.nodes[0], *(pull.worker.node for pull in transfer.pulls)}
            self.world.expectations.expect(
                Check.COMPLETED,
                f"{transfer.transfer_id} of {publisher.name} is not released, and all have it",
                (publisher, self, *self.world.node_names),
                COMPLETED_S,
                lambda: (
                    transfer.is_over
                    or not publisher.is_alive
                    or any(self.world.was_away(node, transfer.published_at) for node in nodes)
                ),
                SOON_S,
            )

    def _check_bytes(self, pull: Pull, event: client.Delivered) -> None:
        """A delivered pull names as many bytes as its rank holds of the request, and how they are read."""
        assert self.shape is not None
        spec, held = self.shape.spec, pull.transfer.publisher.engine.shape.deployment.layouts
        # Readers are spread over ranks that hold the same.
        own = spec.tp_rank * len({rank.tp_rank for rank in held}) // spec.tp_size
        ranks = sorted(held, key=lambda rank: (rank.tp_rank < own, rank.tp_rank))
        sources = [contents_of(held[rank]) for rank in ranks]
        sink, theirs, traits = contents_of(self.shape.layout), pull.transfer.lists, self.world.traits
        num_bytes, num_runs, num_sources = least_reads(sink, sources, pull.lists, theirs)
        may_have_more = traits.read != "direct" or pull.is_progressive or IN_PARTS in traits.small_numbers
        is_right = event.runs >= num_runs if may_have_more else event.runs == num_runs
        if event.bytes != num_bytes or not is_right:
            what = f"pull {event.ticket.number} of {self.name} names {event.bytes} bytes in {event.runs} runs"
            self.world.violate(Check.ALL_BYTES, f"{what}: its rank holds {num_bytes} in {num_runs}")
        self._check_posts(pull, num_sources, num_bytes + num_runs * slices.DESCRIPTOR_COST_BYTES)

    def _check_posts(self, pull: Pull, num_sources: int, cost_bytes: int) -> None:
        """What takes a short time is read from each rank by one post, and the fence word by one."""
        assert self.store is not None
        world, transfer = self.world, pull.transfer
        is_alone = sum(one.worker is self for one in transfer.pulls) == 1
        if pull.is_progressive or not is_alone or not world.expectations.is_calm(pull.began):
            return
        words = {address for _, address, _ in world.words.granted.get(transfer.name, ())}
        for mover in world.holders_of(self.store):
            behind = takewhile(lambda post: post.remote in words, reversed(mover.posts))
            if (num_words := sum(post.at >= pull.began for post in behind)) > 1:
                what = f"{self.name} reads the fence word of {transfer.transfer_id}"
                world.violate(Check.QUIET, f"{what} {num_words} times behind its data")
        is_long = cost_bytes > slices.SliceBudget.MIN_BYTES or MORE_POSTS & {*world.traits.small_numbers}
        has_gpu = {self.engine.shape.memory, transfer.publisher.engine.shape.memory} & {*WITH_GPU}
        if world.traits.read != "direct" or is_long or has_gpu:
            return
        num_posts = posts_into(world.fabric, self.store, pull.lists, pull.began)
        if num_posts > num_sources:  # a mover that has ended since is asked no more
            text = f"{self.name} reads {transfer.transfer_id} of {num_sources} ranks in {num_posts} posts"
            world.violate(Check.QUIET, text)

    def _quiesced(self, ticket: int, event: client.Quiesced) -> None:
        pull = self.pulls.get(ticket)
        if pull is None or pull.ended != "in-doubt":
            self.world.violate(
                Check.ONE_END, f"pull {ticket} of {self.name} is quiesced, and was not in doubt"
            )
            return
        pull.is_quiesced = True
        pull.transfer.grant_returned(self.world.kernel.now)
        self._check_event(pull, event)
        self._free(pull)

    def _check_event(self, pull: Pull, event: client.Delivered | client.Failed | client.Quiesced) -> None:
        """An end names its pull's ticket, which knows of it, and the blocks as they were given."""
        known = {"delivered": (True,), "failed": (False,), "in-doubt": (None, False)}[pull.ended]
        is_wrong = event.ticket is not pull.ticket or event.ticket.delivered not in known
        if isinstance(event, client.Failed):
            has_lost_session = not self.is_connected or self._connected_at > pull.began
            ends_soon = event.code in (Code.BUSY, Code.SOURCE_STALLED)
            is_wrong |= (event.retry_after_s > 0.0) is not ends_soon and not (ends_soon and has_lost_session)
        if is_wrong or _text_of(getattr(event, "blocks", pull.lists)) != _text_of(pull.lists):
            self.world.violate(
                Check.ONE_END, f"{self.name} hears {event}, delivered: {event.ticket.delivered}"
            )

    def _free(self, pull: Pull) -> None:
        assert pull.ticket is not None
        del self.pulls[pull.ticket.number]
        if self.store is not None:
            self.check_memory()
            self.world.kernel.lift_fd_limit()
            if writers := writers_of(self.world.fabric, self.store, pull.lists):
                what = f"the blocks of pull {pull.ticket.number} of {self.name}"
                text = f"{what} are said to be safe, and {writers} may write them"
                self.world.violate(Check.SAFE, text)
            self.store.take_back(pull.lists)


def _text_of(lists: Lists) -> str:
    return ", ".join(f"{name} {list(one.ids)}" for name, one in lists.items())


def _text(event: client.Event) -> str:
    match event:
        case client.Failed():
            safe = "" if event.safe_to_reuse else ", blocks in doubt"
            return f"Failed {event.ticket.number} ({event.code}{safe}): {event.message}"
        case client.Delivered() | client.Quiesced():
            return f"{type(event).__name__} {event.ticket.number}"
        case client.Released():
            return f"Released {event.transfer_id} ({event.why})"
        case client.PublishRefused():
            return f"PublishRefused {event.transfer_id} ({event.code}): {event.message}"
        case _:
            return str(event)
