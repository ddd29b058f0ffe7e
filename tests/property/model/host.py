"""One node with its workers, movers and memory, moved step by step. Real core, simulated rest.

A host never waits: what its node wants done locally is done at once, except what the model wants to
happen at any moment, which is offered as steps.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvxferd.core import Node
from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.errors import Code
from kvxferd.layout import EngineSpec, PackedBlocks, RankLayout, pack_ids, unpack_ids
from kvxferd.layout.presets import attention_layout
from kvxferd.wire import mover as mv
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.common import Message, RegionAddress, TransferRef
from tests.property.model.digest import CLOCK_START, digest
from tests.property.model.scenario import SETTINGS, Scenario

BLOCK_TOKENS = 4
NUM_BLOCKS = 2  # of one transfer
TOKENS = NUM_BLOCKS * BLOCK_TOKENS
PAGE = 1 << 30  # where a fence page lies
# By whose connection a message comes, as the node sees it that gets it.
THEIRS, OURS = b"?", b"!"
OVERWRITTEN = bytes(16)
Step = tuple[Any, ...]
Reach = tuple[tuple[int, ...], dict[int, bytes]]  # blocks, and the fence words by their address


@dataclass
class Worker:
    """A rank's process. Blocks hold the number of the transfer whose bytes they have, 0 for other ones."""

    session: int
    spec: EngineSpec
    layout: RankLayout
    memory: list[int]
    alive: bool = True
    words: dict[int, bytes] = field(default_factory=dict)  # its fence page
    said: set[str] = field(default_factory=set)  # what it does once only
    released: set[int] = field(default_factory=set)
    ended: dict[int, str] = field(default_factory=dict)  # by ticket: delivered, failed or in-doubt
    quiet: set[int] = field(default_factory=set)
    noticed: set[int] = field(default_factory=set)  # tickets of which a mover has told it itself


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
    worker: Worker
    alive: bool = True
    jobs: dict[int, Job] = field(default_factory=dict)
    remotes: set[str] = field(default_factory=set)
    reports: deque[ev.Event] = field(default_factory=deque)


class Host:
    """The source or the sink."""

    def __init__(self, name: str, scenario: Scenario) -> None:
        self.name = name
        self.scenario = scenario
        self.now = CLOCK_START
        self.tokens = itertools.count()
        self.numbers = itertools.count(1)
        self.workers: dict[int, Worker] = {}
        self.movers: dict[int, Mover] = {}
        self.deaths = 0
        self.watched: set[int] = set()  # movers that their workers have acknowledged
        self.is_up = True
        self.era = 0  # counts this node's daemons
        self._sent: list[bytes] = []
        self._local: deque[ev.Event] = deque()
        self.node = self._start_node()
        self._start_workers()
        self._settle()

    def _start_node(self) -> Node:
        return Node(
            boot=f"boot-{self.name}-{self.era}",
            endpoint=endpoint_of(self.name),
            settings=SETTINGS,
            new_token=lambda: f"{next(self.tokens):032x}",
        )

    def _start_workers(self) -> None:
        for tp_rank in range(1 if self.name == "source" else self.scenario.readers):
            self._start_worker(tp_rank)

    def _start_worker(self, tp_rank: int) -> None:
        size = 1 if self.name == "source" else self.scenario.readers
        spec = EngineSpec(self.name, "g", num_layers=1, tp_size=size, tp_rank=tp_rank, num_kv_heads=2)
        blocks = NUM_BLOCKS * (1 if self.name == "source" else self.scenario.transfers)
        layout = attention_layout(
            spec=spec,
            num_kv_heads=2,
            head_dim=2,
            block_tokens=BLOCK_TOKENS,
            num_blocks=blocks,
            layout="HND",
        )
        worker = Worker(next(self.numbers), spec, layout, [0] * blocks)
        self.workers[worker.session] = worker
        region = layout.regions[0]
        exports = (wk.RegionExport(region.region, region.size_bytes, 0),)
        self._feed(ev.WorkerConnected(worker.session, 1, 0))
        self._say(worker, wk.Hello(versions=wk.WORKER_VERSIONS, client=""))
        self._say(
            worker,
            wk.Register(
                request=1,
                engine=spec,
                layout=layout,
                regions=exports,
                incarnation="first",
            ),
        )

    # --- what the exploration sees

    def key(self) -> bytes:
        """The digest of all that can matter from here on."""
        return digest((self.node, self.workers, self.movers, self.deaths), self.now)

    def due(self) -> bool:
        """Whether a timer waits to be run."""
        deadline = self.node.next_deadline()
        return deadline is not None and deadline <= self.now

    def deadlines(self) -> list[float]:
        """Seconds until each moment at which a timer is set, soonest first."""
        timers = self.node.context.timers
        at = {at for at, order, name in timers._heap if timers._live.get(name, (None,))[0] == order}
        return sorted(moment - self.now for moment in at if moment > self.now)

    def reach(self) -> dict[str, Reach]:
        """What each mover lets others read."""
        worker = self.workers[1]
        words = {PAGE + 16 * slot: word for slot, word in worker.words.items()}
        memory = tuple(worker.memory)
        return {mover.agent: (memory, words) for mover in self.movers.values() if mover.alive}

    def leftovers(self) -> list[str]:
        """What a node without work would not remember."""
        node = self.node
        kept = {
            "pulls": node.pulls,
            "transfers": node.published.table.live,
            "grants": node.published.table.by_grant,
            "holds": node.grant_client.num_grants(),
            "questions": node.peer_requests,
            "asks": node.grant_server._pending,
            "fetches": node.handshake_server._pending,
            "polling": node.poll_requests._states,
        }
        return [f"{self.name}: {len(found)} {name}" for name, found in kept.items() if len(found)]

    # --- steps

    def do(self, step: Step) -> list[bytes]:
        """Take one step. Return the messages for the other node."""
        getattr(self, f"_do_{step[0]}")(*step[1:])
        self._settle()
        sent, self._sent = self._sent, []
        return sent

    def _settle(self) -> None:
        while self._local:
            self._feed(self._local.popleft())

    def _do_peer(self, payload: bytes) -> None:
        """A message: the first byte says by whose connection it came, the second of which of its daemons."""
        message = PEER_MESSAGES.decode(payload[2:])
        other = "sink" if self.name == "source" else "source"
        if payload[:1] == THEIRS:
            self._feed(ev.PeerRequest(b"%s/%d" % (other.encode(), payload[1]), message))
        elif payload[1] == self.era:
            self._feed(ev.PeerReply(endpoint_of(other), message))

    def _do_clock(self, seconds: float) -> None:
        self.now += seconds

    def _do_tick(self) -> None:
        self._feed(ev.Tick())

    def _do_publish(self, number: int) -> None:
        worker = self.workers[1]
        worker.said.add(f"publish {number}")
        grows = self.scenario.grows
        worker.memory = [number] * (1 if grows else NUM_BLOCKS)
        worker.memory += [0] * (NUM_BLOCKS - len(worker.memory))
        worker.words[0] = word_of(number)
        publish = wk.Publish(
            transfer_id=f"t{number}",
            nonce="n",
            blocks={"full": PackedBlocks(pack_ids(list(range(NUM_BLOCKS))))},
            num_tokens=TOKENS,
            fence_slot=0,
            incarnations=((worker.spec.rank, "first"),),
            ready_tokens=BLOCK_TOKENS if grows else -1,
        )
        self._feed(ev.WorkerMessage(worker.session, publish, None, worker.words[0]))

    def _do_extend(self, number: int) -> None:
        worker = self.workers[1]
        worker.said.add(f"extend {number}")
        worker.memory = [number] * NUM_BLOCKS
        self._say(worker, wk.Ready(transfer_id=f"t{number}", incarnation="first"))

    def _do_unpublish(self, number: int) -> None:
        worker = self.workers[1]
        worker.said.add(f"unpublish {number}")
        self._say(worker, wk.Unpublish(transfer_id=f"t{number}"))

    def _do_pull(self, session: int, number: int) -> None:
        worker = self.workers[session]
        worker.said.add(f"pull {number}")
        ids = [NUM_BLOCKS * (number - 1) + i for i in range(NUM_BLOCKS)]
        blocks = {"full": PackedBlocks(pack_ids(ids))}
        ref = TransferRef(endpoint_of("source"), "source", "g", f"t{number}", "n")
        request = wk.PullRequest(ticket=number, ref=ref, blocks=blocks, num_tokens=TOKENS, deadline_s=4.0)
        self._say(worker, msgspec.structs.replace(request, progressive=self.scenario.grows))

    def _do_cancel(self, session: int, number: int) -> None:
        worker = self.workers[session]
        worker.said.add(f"cancel {number}")
        self._say(worker, wk.Cancel(ticket=number))

    def _do_close(self, session: int) -> None:
        worker = self.workers[session]
        if told := [ticket for ticket in worker.noticed if worker.ended[ticket] == "delivered"]:
            self._say(worker, wk.DeliveredByMover(tickets=tuple(sorted(told))))
        worker.alive = False
        self._feed(ev.WorkerDisconnected(session))

    # --- movers

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
        assert job.fence.agent in mover.remotes, "the fence's agent was never loaded"
        if word is None:
            self._report(
                mover, job, delivered=False, agent=job.fence.agent, message="gone", code=Code.TRANSPORT
            )
        elif word == job.fence.word or self.scenario.blind:
            if (self.scenario.deliveries or self.scenario.clients) and not job.is_piece:
                job.told = True
                self._notice(mover.worker, job.ticket)
            else:
                self._report(mover, job, delivered=True)
        else:
            self._report(mover, job, delivered=False, message="fence word changed", code=Code.RELEASED)

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
        mover = self.movers[number]
        event = mover.reports.popleft()
        if isinstance(event, ev.MoverDied):
            del self.movers[number]
        self._feed(event)

    def _do_die(self, number: int) -> None:
        self.deaths += 1
        self._kill(self.movers[number])

    def _kill(self, mover: Mover) -> None:
        if mover.alive:
            mover.alive = False
            mover.jobs.clear()
            mover.reports.append(ev.MoverDied(mover.mover))

    # --- the node

    def _say(self, worker: Worker, message: Message) -> None:
        self._feed(ev.WorkerMessage(worker.session, message))

    def _feed(self, event: ev.Event) -> None:
        for effect in self.node.feed(event, self.now):
            self._act(effect)
        self.node.check_integrity()

    def _act(self, effect: fx.Effect) -> None:
        match effect:
            case fx.SendToWorker() if isinstance(effect.message, wk.MoverOffered):
                assert effect.pidfd_of is not None
                self.watched.add(effect.pidfd_of)
                watched = wk.MoverAcknowledged(number=effect.message.number)
                self._local.append(ev.WorkerMessage(effect.session, watched))
            case fx.SendToWorker() if isinstance(effect.message, wk.PullsInterrupted):
                worker = self.workers[effect.session]
                if worker.alive:
                    self._local.append(ev.WorkerMessage(effect.session, resumed(worker, effect.message)))
            case fx.SendToWorker():
                self._heard(self.workers[effect.session], effect.message)
            case fx.CloseWorkerConnection():
                raise AssertionError("a correct worker was expelled")
            case fx.OverwriteFenceWord():
                self.workers[effect.session].words[effect.slot] = OVERWRITTEN
            case fx.RequestMover():
                number = next(self.numbers)
                mover = Mover(number, f"{self.name}/{number}", self.workers[effect.session])
                self.movers[number] = mover
                self._local.append(ev.MoverAssigned(effect.session, number, mover.agent, "model"))
            case fx.KillMover():
                self._kill(self.movers[effect.mover])
            case fx.BindMover():
                assert effect.mover in self.watched, "a mover has memory that its worker does not watch"
                region = self.workers[effect.session].layout.regions[0]
                address = RegionAddress(region.region, 4096, region.size_bytes)
                self._reply(effect.mover, mv.Bound(regions=(address,), metadata=b""))
            case fx.ShareFencePage():
                self._reply(effect.mover, mv.FenceMapped(session=effect.session, address=PAGE, metadata=b""))
            case fx.SendToMover():
                if effect.mover in self.movers and self.movers[effect.mover].alive:
                    self._to_mover(self.movers[effect.mover], effect.message)
            case fx.SendToPeer():
                self._sent.append(THEIRS + bytes([self.era]) + encode(effect.message))
            case fx.ReplyToPeer():
                era = int(effect.route.rpartition(b"/")[2])
                self._sent.append(OURS + bytes([era]) + encode(effect.message))
            case (
                fx.CommitRegionFds()
                | fx.CreateFencePage()
                | fx.SaveOwnerships()
                | fx.ClosePeerConnection()
                | fx.EmitRecord()
            ):
                pass

    def _reply(self, mover: int, message: mv.FromMover) -> None:
        if mover in self.movers and self.movers[mover].alive:
            self._local.append(ev.MoverMessage(mover, message))

    def _to_mover(self, mover: Mover, message: Message) -> None:
        match message:
            case mv.SetPolling():
                if message.on:
                    self._reply(mover.mover, mv.Polling(token=message.token))
            case mv.LoadRemote():
                mover.remotes.add(message.agent)
            case mv.DropRemote():
                mover.remotes.discard(message.agent)
            case mv.StartPull():
                assert self.node.movers.accepts_pulls(mover.mover), "a mover that is to end got a pull"
                agent = message.sources[0].agent
                first = message.local["full"].first_token // BLOCK_TOKENS
                local, remote = (unpack_ids(side["full"].ids) for side in (message.local, message.remote))
                end = first + len(local)
                pairs = [(mine, agent, theirs) for mine, theirs in zip(local, remote[first:end], strict=True)]
                ticket = pairs[0][0] // NUM_BLOCKS + 1
                is_piece = message.ticket is None
                mover.jobs[message.pull] = Job(message.pull, ticket, pairs, message.fence, is_piece)
            case mv.AbortPull():
                if message.pull in mover.jobs:
                    mover.jobs[message.pull].stopped = True

    # --- what a worker is told

    def _heard(self, worker: Worker, message: Message) -> None:
        if not worker.alive:
            return
        match message:
            case wk.Released():
                number = int(message.transfer_id[1:])
                assert number not in worker.released, f"t{number} was released twice"
                assert worker.words[0] != word_of(number), f"t{number} was released before its fence word"
                worker.released.add(number)
                worker.memory = [0] * NUM_BLOCKS  # reused at once
            case wk.TicketFailed() | wk.TicketQuiesced() if message.ticket in worker.noticed:
                pass  # a late word
            case wk.TicketDelivered():
                self._delivered(worker, message.ticket)
            case wk.TicketFailed():
                self._end(worker, message.ticket, "failed" if message.safe_to_reuse else "in-doubt")
            case wk.TicketQuiesced():
                assert worker.ended[message.ticket] == "in-doubt", f"ticket {message.ticket} was safe before"
                assert message.ticket not in worker.quiet, f"ticket {message.ticket} was quiet before"
                worker.quiet.add(message.ticket)
            case wk.PublishRefused():
                raise AssertionError(f"a correct publish was refused: {message.message}")

    def _notice(self, worker: Worker, ticket: int) -> None:
        """What a client makes of its mover's word."""
        if not worker.alive:
            return
        worker.noticed.add(ticket)
        if worker.ended.get(ticket) == "in-doubt":
            worker.quiet.add(ticket)
        else:
            self._delivered(worker, ticket)

    def _delivered(self, worker: Worker, ticket: int) -> None:
        self._end(worker, ticket, "delivered")
        first = NUM_BLOCKS * (ticket - 1)
        found = worker.memory[first : first + NUM_BLOCKS]
        assert found == [ticket] * NUM_BLOCKS, f"t{ticket}: {found} was delivered"

    def _end(self, worker: Worker, ticket: int, how: str) -> None:
        assert ticket not in worker.ended, f"ticket {ticket} ended twice"
        worker.ended[ticket] = how


def endpoint_of(name: str) -> str:
    """Where a node is asked."""
    return f"tcp://{name}:1"


def word_of(number: int) -> bytes:
    """A transfer's fence word."""
    return bytes([number]) * 16


def resumed(worker: Worker, message: wk.PullsInterrupted) -> wk.PullsResumed:
    """What a client answers for pulls whose mover died."""
    again = tuple(ticket for ticket in message.tickets if ticket not in worker.ended)
    delivered = tuple(t for t in message.tickets if t in worker.noticed and worker.ended[t] == "delivered")
    return wk.PullsResumed(number=message.number, tickets=again, arrived=delivered)
