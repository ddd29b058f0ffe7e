"""One node with its processes, movers and memory, moved step by step. The core and the client are real.

A host never waits: what its node wants done locally is done at once, except what the model wants to
happen at any moment, which is offered as steps (`steps.py`). The source has a rank, and maybe a scheduler
that publishes; the sink has the ranks that read, and a second rank of the source's engine where that spans.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvxferd.client import events as ce
from kvxferd.client.session import PERMANENT_REFUSALS
from kvxferd.core import Node
from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.layout import EngineSpec, PackedBlocks, pack_ids, unpack_ids
from kvxferd.layout.presets import attention_layout
from kvxferd.wire import mover as mv
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.common import Message, RegionAddress, TransferRef
from tests.property.model.digest import CLOCK_START, digest
from tests.property.model.process import NUM_SLOTS, OVERWRITTEN, Page, Process, ToldWorker
from tests.property.model.scenario import SETTINGS, Scenario
from tests.support.sim.node import LIBRARY, SimNode
from tests.support.sim.schedule import Schedule

BLOCK_TOKENS = 4
PAGE = 1 << 30  # where the first fence page lies
PAGE_BYTES = 1 << 16
RETRY_S = 1.0
# By whose connection a message comes, as the node sees it that gets it.
THEIRS, OURS = b"?", b"!"
Step = tuple[Any, ...]
Reach = tuple[tuple[int, ...], dict[int, bytes]]  # blocks, and the fence words by their address


@dataclass
class Job:
    """One pull in a mover."""

    pull: int
    ticket: int
    pairs: list[tuple[int, str, int]]  # local block, remote agent, remote block
    fence: mv.FenceLocation
    is_piece: bool = False  # its end is not the pull's
    read: int = 0  # of the pairs
    stopped: bool = False
    doubted: bool = False
    told: bool = False  # the worker knows that it is delivered, the daemon does not yet


@dataclass
class Mover:
    """A mover process."""

    mover: int
    agent: str
    worker: Process | None = None  # from its offer on
    alive: bool = True
    jobs: dict[int, Job] = field(default_factory=dict)
    remotes: set[str] = field(default_factory=set)
    reports: deque[ev.Event] = field(default_factory=deque)


class Host(SimNode):
    """The source or the sink."""

    def __init__(self, name: str, scenario: Scenario) -> None:
        self.name = name
        self.scenario = scenario
        self.clock = CLOCK_START
        self.tokens = itertools.count()
        self.numbers = itertools.count(1)
        self.is_up = True
        self.era = 0  # counts this node's daemons
        self.crashes = 0
        self.deaths = 0
        self.processes: list[Process] = []
        self.workers: dict[int, Process] = {}  # by session
        self.told: dict[int, ToldWorker] = {}  # by session
        self.fences: dict[int, Page] = {}  # by session: the page that the daemon made for it
        self.movers: dict[int, Mover] = {}
        self.orphans: set[int] = set()  # movers of a daemon that is dead
        self.pages: dict[int, dict[int, Page]] = {}  # by mover: the pages that it serves, by address
        self.watched: set[int] = set()  # movers whose workers have their pidfds
        self._sent: list[bytes] = []
        self._soon = Schedule()
        super().__init__(self._start_node(), self._soon)
        self._add_processes()
        self.publisher = self.processes[-1] if scenario.scheduler else self.processes[0]  # at the source

    def _start_node(self) -> Node:
        tokens = self.tokens  # of `self` the digest would see what counts its events
        node = Node(
            boot=f"boot-{self.name}-{self.era}",
            endpoint=endpoint_of(self.name),
            settings=SETTINGS,
            new_token=lambda: f"{next(tokens):032x}",
        )
        node.feed(ev.ForkserverReady(LIBRARY), self.clock)
        node.mover_pool._last_number = max(self.movers, default=0)  # movers of an earlier daemon may live
        return node

    def _add_processes(self) -> None:
        scenario = self.scenario
        if self.name == "source":
            self._add_rank("source", 0, scenario.columns)
            if scenario.scheduler:
                self._add("scheduler", 0).join_as(self._engine("source", 0, scenario.columns), None)
            return
        for tp_rank in range(scenario.readers):
            self._add_rank("sink", tp_rank, scenario.readers)
        if scenario.spans:
            member = self._add_rank("source", 1, scenario.columns)
            member.memory = [0 if scenario.ready else 1]

    def _add(self, name: str, cells: int) -> Process:
        self.processes.append(Process(len(self.processes), name, cells))
        return self.processes[-1]

    def _add_rank(self, engine: str, tp_rank: int, tp_size: int) -> Process:
        spec = self._engine(engine, tp_rank, tp_size)
        is_source = engine == "source"
        blocks = self.scenario.blocks * (1 if is_source else self.scenario.pulls)
        layout = attention_layout(
            spec=spec, num_kv_heads=2, head_dim=2, block_tokens=BLOCK_TOKENS, num_blocks=blocks, layout="HND"
        )
        process = self._add(f"{engine}-{tp_rank}", blocks * (1 if is_source else self.scenario.columns))
        process.join_as(spec, layout)
        return process

    def _engine(self, name: str, tp_rank: int, tp_size: int) -> EngineSpec:
        is_source, scenario = name == "source", self.scenario
        return EngineSpec(
            name,
            "g",
            num_layers=1,
            tp_size=tp_size,
            tp_rank=tp_rank,
            num_kv_heads=2,
            publish_implies_ready=is_source and scenario.scheduler and not scenario.ready,
            home=endpoint_of("source") if is_source and scenario.spans else "",
        )

    # --- what the exploration sees

    def key(self) -> bytes:
        """The digest of all that can matter from here on."""
        node = self.node if self.is_up else None
        kept = (node, self.processes, self.movers, self.orphans, self.fences, self.pages, self.workers)
        counts = (self.is_up, self.era, self.crashes, self.deaths, self.numbers, self.tokens)
        return digest((kept, self.told, self.watched, counts), self.clock)

    def due(self) -> bool:
        """Whether a timer waits to be run."""
        return any(at <= self.clock for at in self._times())

    def deadlines(self) -> list[float]:
        """Seconds until each moment at which a timer is set, soonest first."""
        moments = {at for at in self._times() if self.clock < at < math.inf}
        if self.is_up:
            timers = self.node.context.timers
            at = {at for at, order, name in timers._heap if timers._live.get(name, (None,))[0] == order}
            moments |= {moment for moment in at if moment > self.clock}
        return sorted(moment - self.clock for moment in moments)

    def _times(self) -> Iterator[float]:
        if self.is_up and (at := self.node.next_deadline()) is not None:
            yield at
        for process in self.living():
            yield process.client.next_deadline()
            if process.session is None and process.retry_at > self.clock:
                yield process.retry_at

    def living(self) -> list[Process]:
        """The processes that have not been closed."""
        return [process for process in self.processes if process.is_alive]

    def reach(self) -> dict[str, Reach]:
        """What each mover lets others read."""
        found: dict[str, Reach] = {}
        for mover in self.movers.values():
            if mover.alive:
                pages = self.pages.get(mover.mover, {})
                words = {at + 16 * s: word for at, p in pages.items() for s, word in p.words.items()}
                found[mover.agent] = (tuple(mover.worker.memory), words)
        return found

    def leftovers(self) -> list[str]:
        """What a node without work would not remember."""
        if not self.is_up:
            return [f"{self.name}: its daemon is not there"]
        node = self.node
        kept = {
            "pulls": node.pulls,
            "transfers": node.published.table.live,
            "grants": node.published.table.by_grant,
            "holds": node.grant_client.num_grants(),
            "questions": node.peer_requests,
            "waiting requests": node.waiting,
            "polling": node.poll_requests._states,
        }
        left = [f"{self.name}: {len(found)} {name}" for name, found in kept.items() if len(found)]
        for process in self.living():
            if len(process.client._pulls) or len(process.client._publishes):
                left.append(f"{process.name}: a pull or a publish")
        return left

    # --- steps of the node

    def do(self, step: Step) -> list[bytes]:
        """Take one step. Return the messages for the other node."""
        getattr(self, f"_do_{step[0]}")(*step[1:])
        self._settle()
        sent, self._sent = self._sent, []
        return sent

    def _do_begin(self) -> None:
        for process in self.processes:
            self._do_connect(process.number)
            self._settle()

    def _do_peer(self, payload: bytes) -> None:
        """A message: the first byte says by whose connection it came, the second of which of its daemons."""
        message = PEER_MESSAGES.decode(payload[2:])
        other = "sink" if self.name == "source" else "source"
        if payload[:1] == THEIRS:
            self.feed(ev.PeerRequest(b"%s/%d" % (other.encode(), payload[1]), message))
        elif payload[1] == self.era:
            self.feed(ev.PeerReply(endpoint_of(other), message))

    def _do_clock(self, seconds: float) -> None:
        self.clock += seconds

    def _do_tick(self) -> None:
        self.feed(ev.Tick())
        for process in self.living():
            try:
                process.client.tick(self.clock)
            except KvxferdError as error:
                self._drop(process, error)

    def _do_crash(self) -> None:
        """The daemon is gone at once; its movers go when they see it."""
        self.crashes += 1
        self.is_up = False
        self.era += 1
        self.orphans = set()
        for mover in list(self.movers.values()):
            if mover.alive:
                self.orphans.add(mover.mover)
                mover.reports.clear()
            else:
                del self.movers[mover.mover]
        self.workers.clear()
        self.fences.clear()
        self.told.clear()
        for process in self.processes:
            process.up.clear()
            process.down.clear()  # a daemon may die before it has sent all that it wanted to
            if process.session is not None:
                process.down.append(None)

    def _do_start(self) -> None:
        self.is_up = True
        self.node = self._start_node()

    # --- steps of processes

    def _do_connect(self, number: int) -> None:
        process = self.processes[number]
        process.session = next(self.numbers)
        self.workers[process.session] = process
        self.told[process.session] = ToldWorker(process.name)
        process.client.connection_made(self.clock)
        self.feed(ev.WorkerConnected(process.session, 1, 0))

    def _do_send(self, number: int) -> None:
        process = self.processes[number]
        self._give(process, process.up.popleft())

    def _do_read(self, number: int) -> None:
        self._read(self.processes[number])

    def _do_publish(self, number: int) -> None:
        publisher, scenario = self.publisher, self.scenario
        publisher.said.add(f"publish {number}")
        if not scenario.ready:
            num_written = 1 if scenario.grows else scenario.blocks
            self._write(number, num_written)
        try:
            publisher.client.publish(
                f"t{number}",
                {"full": PackedBlocks(pack_ids(list(range(scenario.blocks))))},
                num_tokens=scenario.blocks * BLOCK_TOKENS,
                num_readers=1,
                lease_s=None,
                now=self.clock,
                ready_tokens=BLOCK_TOKENS if scenario.grows else -1,
                nonce="n",  # a replay must give the same one
            )
        except EngineError:
            publisher.released.add(number)  # it knows no rank of the engine, and says so

    def _write(self, number: int, num_blocks: int) -> None:
        """Have every rank write so many blocks of a transfer, and overwrite the others."""
        for process in self.processes:
            if process.layout is not None:
                process.memory = [number if block < num_blocks else 0 for block in range(len(process.memory))]

    def _do_extend(self, number: int) -> None:
        self.publisher.said.add(f"extend {number}")
        self._write(number, self.scenario.blocks)
        self.publisher.client.ready(f"t{number}", self.clock)

    def _do_unpublish(self, number: int) -> None:
        self.publisher.said.add(f"unpublish {number}")
        self.publisher.client.unpublish(f"t{number}")

    def _do_ready(self, number: int, transfer: int) -> None:
        process = self.processes[number]
        process.said.add(f"ready {transfer}")
        process.memory = [transfer] * len(process.memory)
        process.client.ready(f"t{transfer}", self.clock)

    def _do_suspend(self, number: int) -> None:
        process = self.processes[number]
        process.num_sleeps += 1
        process.client.suspend()

    def _do_resume(self, number: int) -> None:
        """The engine maps memory anew: whatever it holds, it was not published."""
        process = self.processes[number]
        process.is_mapped = True
        process.client.resume(process.exports())

    def _do_pull(self, number: int, ticket: int) -> None:
        process, scenario = self.processes[number], self.scenario
        process.said.add(f"pull {ticket}")
        first = scenario.blocks * (ticket - 1)
        blocks = {"full": PackedBlocks(pack_ids(list(range(first, first + scenario.blocks))))}
        transfer = min(ticket, scenario.transfers)
        ref = TransferRef(endpoint_of("source"), "source", "g", f"t{transfer}", "n")
        num_tokens, deadline = scenario.blocks * BLOCK_TOKENS, self.clock + 4.0
        process.client.pull(ref, blocks, num_tokens, deadline, process.said.add, progressive=scenario.grows)

    def _do_cancel(self, number: int, ticket: int) -> None:
        process = self.processes[number]
        process.said.add(f"cancel {ticket}")
        process.client.cancel(ticket)

    def _do_close(self, number: int) -> None:
        """The process ends: what its mover told it, it tells the daemon first."""
        process = self.processes[number]
        if (told := process.client.pop_final_deliveries()) is not None:
            self._give(process, told)
        process.is_alive = False
        process.up.clear()
        process.down.clear()
        process.events.clear()
        session, process.session = process.session, None
        self._disconnected(session)

    # --- steps of movers

    def _do_slice(self, number: int, pull: int, content: int | None) -> None:
        mover = self.movers[number]
        job = mover.jobs[pull]
        block, agent, _ = job.pairs[job.read]
        worker = mover.worker
        assert agent in mover.remotes, "an agent was never loaded"
        is_safe = worker.ended.get(job.ticket) in ("delivered", "failed") or job.ticket in worker.quiet
        assert not is_safe, f"the blocks of ticket {job.ticket} are written after they were said to be safe"
        if content is None:
            self._report(mover, job, delivered=False, agent=agent, message="gone", code=Code.TRANSPORT)
            return
        worker.memory[block] = content
        job.read += 1

    def _do_fence(self, number: int, pull: int, word: bytes | None) -> None:
        mover = self.movers[number]
        job = mover.jobs[pull]
        agent = job.fence.agent
        assert agent in mover.remotes, "the fence's agent was never loaded"
        if word is None:
            self._report(mover, job, delivered=False, agent=agent, message="gone", code=Code.TRANSPORT)
        elif word != job.fence.word and not self.scenario.blind:
            self._report(mover, job, delivered=False, message="fence word changed", code=Code.RELEASED)
        elif self.scenario.deliveries and not job.is_piece:
            job.told = True
            mover.worker.noticed.add(job.ticket)
            if mover.worker.is_alive:
                told = wk.TicketDelivered(ticket=job.ticket, bytes=1, runs=1, wire_s=0.0)
                mover.worker.client.handle_delivered_by_mover(told)
        else:
            self._report(mover, job, delivered=True)

    def _do_stop(self, number: int, pull: int) -> None:
        mover = self.movers[number]
        job = mover.jobs[pull]
        self._report(mover, job, delivered=False, started=job.read > 0)

    def _do_report(self, number: int, pull: int) -> None:
        mover = self.movers[number]
        self._report(mover, mover.jobs[pull], delivered=True, sent_to_worker=True)

    def _do_doubt(self, number: int, pull: int) -> None:
        mover = self.movers[number]
        job = mover.jobs[pull]
        job.doubted = True
        outcome = mv.PullOutcome(delivered=False, finished=False, code=Code.TRANSPORT, message="not known")
        mover.reports.append(ev.MoverMessage(number, mv.PullDone(pull=pull, outcome=outcome)))

    def _do_quiet(self, number: int, pull: int) -> None:
        mover = self.movers[number]
        del mover.jobs[pull]
        mover.reports.append(ev.MoverMessage(number, mv.PullQuiesced(pull=pull)))

    def _report(self, mover: Mover, job: Job, **outcome: Any) -> None:
        del mover.jobs[job.pull]
        done = mv.PullDone(pull=job.pull, outcome=mv.PullOutcome(**outcome))
        mover.reports.append(ev.MoverMessage(mover.mover, done))

    def _do_hear(self, number: int) -> None:
        event = self.movers[number].reports.popleft()
        if number in self.orphans:
            return  # nobody listens
        if isinstance(event, ev.MoverDied):
            del self.movers[number]
        self.feed(event)

    def _do_die(self, number: int) -> None:
        self.deaths += 1
        self.kill_mover(number)

    def _do_perish(self, number: int) -> None:
        self.orphans.discard(number)
        self.kill_mover(number)
        del self.movers[number]
        self.pages.pop(number, None)

    # --- what needs no decision

    def _settle(self) -> None:
        """Do whatever needs no decision, in order."""
        while self._settle_one():
            pass

    def _settle_one(self) -> bool:
        living = self.living()
        for process in living:
            if process.events:
                self._happened(process, process.events.popleft())
                return True
        if self._soon.run_next(self._soon.now):
            return True
        for process in living:
            lags = self.scenario.lag and process.name == "scheduler"
            if process.down and not lags:
                self._read(process)
                return True
            if process.session in self.workers:  # else it talks to a daemon that is dead
                if (outgoing := process.client.pop_outgoing(self.clock)) is not None:
                    process.up.append(outgoing.message)
                    return True
                if process.up and not lags:
                    self._give(process, process.up.popleft())
                    return True
        return False

    def _give(self, process: Process, message: Message) -> None:
        """A frame arrives at the daemon."""
        if process.session in self.workers:
            word = b""
            if isinstance(message, wk.Publish):
                word = self.fences[process.session].read(message.fence_slot)
            self.feed(ev.WorkerMessage(process.session, message, None, word))

    def _read(self, process: Process) -> None:
        """A frame arrives at the client, or the end of its connection."""
        entry = process.down.popleft()
        if entry is None:
            self._lose(process, KvxferdError("the daemon closed the connection", Code.DAEMON_LOST))
            return
        message, page, pidfd_of = entry
        if not process.client.carries_fence_page(message):
            page = None
        if pidfd_of in self.movers and self.movers[pidfd_of].alive:
            process.watched.setdefault(process.client.epoch, set()).add(pidfd_of)
            self.watched.add(pidfd_of)
        try:
            process.client.handle(message, self.clock, page)
        except KvxferdError as error:
            self._drop(process, error)

    def _drop(self, process: Process, error: KvxferdError) -> None:
        """The client gives the connection up."""
        session = process.session
        process.up.clear()
        process.down.clear()
        self._lose(process, error)
        self._disconnected(session)

    def _disconnected(self, session: int | None) -> None:
        if session is not None and self.is_up:
            self.feed(ev.WorkerDisconnected(session))
            self.workers.pop(session, None)
            self.told.pop(session, None)

    def _lose(self, process: Process, error: KvxferdError) -> None:
        process.session = None
        process.retry_at = self.clock + (0.0 if error.code is Code.DAEMON_LOST else RETRY_S)
        process.client.connection_lost(self.clock, error.code, error.message)
        assert error.code not in PERMANENT_REFUSALS, f"the session of {process.name} ended: {error}"
        process.lost.add(process.client.epoch)
        process.judge()

    # --- effects

    def now(self) -> float:
        return self.clock

    def set_timer(self) -> None:
        """The exploration ticks."""

    def feed(self, event: ev.Event) -> None:
        if self.is_up:
            super().feed(event)

    def send_to_worker(self, effect: fx.SendToWorker) -> None:
        if process := self.workers.get(effect.session):
            self._check_told(process, effect)
            page = self._fence_page(effect.session) if effect.with_fence_page else None
            if effect.pidfd_of is not None:
                self.movers[effect.pidfd_of].worker = process
            process.down.append((effect.message, page, effect.pidfd_of))

    def _check_told(self, process: Process, effect: fx.SendToWorker) -> None:
        """Check what the client would hide."""
        self.told[effect.session].check(effect.message)
        match effect.message:
            case wk.TicketDelivered(ticket=ticket):
                assert ticket not in process.noticed, f"ticket {ticket} ended twice"
            case wk.Released(transfer_id=name):
                if (publish := process.client._publishes.get(name)) is not None:
                    word = self.fences[effect.session].words.get(publish.slot, OVERWRITTEN)
                    assert word == OVERWRITTEN, f"{name} was released before its fence word"

    def close_worker(self, session: int) -> None:
        assert self.scenario.has_restarts, "a correct worker was expelled"
        if process := self.workers.pop(session, None):
            process.up.clear()
            process.down.append(None)
            del self.told[session]
        self.feed_soon(ev.WorkerDisconnected(session))

    def _fence_page(self, session: int) -> Page:
        if session not in self.fences:
            self.fences[session] = self.workers[session].new_page()
        return self.fences[session]

    def overwrite_fence_word(self, session: int, slot: int) -> None:
        self.fences[session].overwrite(slot)

    def fork_mover(self, mover: int, agent: str) -> None:
        self.movers[mover] = Mover(mover, agent)
        self.report_up(mover, agent)

    def kill_mover(self, mover: int) -> None:
        killed = self.movers[mover]
        if killed.alive:
            killed.alive = False
            killed.jobs.clear()
            killed.reports.append(ev.MoverDied(mover))
        if mover in self.orphans or not self.is_up:
            killed.reports.clear()
        if killed.worker is not None:
            killed.worker.mover_died(mover)

    def bind_mover(self, effect: fx.BindMover) -> None:
        assert effect.mover in self.watched, "a mover has memory that its worker does not watch"
        region = self.workers[effect.session].layout.regions[0]
        address = RegionAddress(region.region, 4096, region.size_bytes)
        self._reply(effect.mover, mv.Bound(regions=(address,), metadata=b""))

    def share_fence_page(self, mover: int, session: int) -> None:
        address = PAGE + PAGE_BYTES * session
        self.pages.setdefault(mover, {})[address] = self._fence_page(session)
        self._reply(mover, mv.FenceMapped(session=session, address=address, metadata=b""))

    def _reply(self, mover: int, message: mv.FromMover) -> None:
        if mover in self.movers and self.movers[mover].alive:
            self.feed_soon(ev.MoverMessage(mover, message))

    def send_to_mover(self, mover: int, message: Message) -> None:
        hearer = self.movers.get(mover)
        if hearer is None or not hearer.alive:
            return
        match message:
            case mv.SetPolling():
                if message.on:
                    self._reply(mover, mv.Polling(token=message.token))
            case mv.LoadRemote():
                hearer.remotes.add(message.agent)
            case mv.DropRemote():
                hearer.remotes.discard(message.agent)
            case mv.StartPull():
                assert self.node.movers.accepts_pulls(mover), "a mover that is to end got a pull"
                hearer.jobs[message.pull] = self._job_of(message)
            case mv.AbortPull():
                if message.pull in hearer.jobs:
                    hearer.jobs[message.pull].stopped = True

    def _job_of(self, start: mv.StartPull) -> Job:
        mine, theirs = start.local["full"], start.remote["full"]
        local, remote = unpack_ids(mine.ids), unpack_ids(theirs.ids)
        first = (mine.first_token - theirs.first_token) // BLOCK_TOKENS  # each is the piece's window
        width = len(start.sources)
        pairs = [
            (width * mine + column, source.agent, theirs)
            for column, source in enumerate(start.sources)
            for mine, theirs in zip(local, remote[first : first + len(local)], strict=True)
        ]
        ticket = local[0] // self.scenario.blocks + 1
        return Job(start.pull, ticket, pairs, start.fence, is_piece=start.ticket is None)

    def send_to_peer(self, endpoint: str, message: Message) -> None:
        self._sent.append(THEIRS + bytes([self.era]) + encode(message))

    def reply_to_peer(self, route: bytes, message: Message) -> None:
        era = int(route.rpartition(b"/")[2])
        self._sent.append(OURS + bytes([era]) + encode(message))

    # --- what an engine is told

    def _happened(self, process: Process, event: ce.Event) -> None:
        match event:
            case ce.Delivered():
                ticket = event.ticket.number
                process.end(ticket, "delivered")
                width = len(process.memory) // self.scenario.pulls
                found = process.memory[width * (ticket - 1) : width * ticket]
                transfer = min(ticket, self.scenario.transfers)
                assert found == [transfer] * width, f"t{transfer}: {found} was delivered"
            case ce.Failed():
                process.end(event.ticket.number, "failed" if event.safe_to_reuse else "in-doubt")
            case ce.Quiesced():
                number = event.ticket.number
                assert process.ended[number] == "in-doubt", f"ticket {number} was safe before"
                assert number not in process.quiet, f"ticket {number} was quiet before"
                process.quiet.add(number)
            case ce.PublishRefused():
                assert self.scenario.has_restarts, f"a correct publish was refused: {event.message}"
                self._over(process, int(event.transfer_id[1:]))
            case ce.Released():
                self._over(process, int(event.transfer_id[1:]))
            case ce.Suspended():
                mappers = [m.agent for m in self.movers.values() if m.alive and m.worker is process]
                assert not mappers, f"{process.name} is suspended and mapped by {mappers}"
                process.is_mapped = False
                process.memory = [0] * len(process.memory)
            case ce.Disconnected():
                raise AssertionError(f"the session of {process.name} is over: {event.message}")

    def _over(self, process: Process, number: int) -> None:
        """Blocks are reused at once: on its own rank by a rank's word, on every rank by the publisher's."""
        if process is not self.publisher:
            process.memory = [0] * len(process.memory)
            return
        assert number not in process.released, f"t{number} was released twice"
        process.released.add(number)
        word = process.fence._page.words.get((number - 1) % NUM_SLOTS, OVERWRITTEN)
        assert word == OVERWRITTEN, f"t{number} was released before its fence word"
        for rank in self.processes:
            rank.memory = [0] * len(rank.memory)


def endpoint_of(name: str) -> str:
    """Where a node is asked."""
    return f"tcp://{name}:1"
