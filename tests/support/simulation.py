"""Several real nodes, joined by links that a test can cut, delay, reorder and duplicate.

Workers, movers and memory are simulated with bytes that really move: a simulated mover expands the
plan, copies from the address space of the source's mover, and reads the fence word, each step when
the test says so.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from kvxferd.core import Node, Settings
from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.core.ranks.rank import RankRecord
from kvxferd.errors import Code
from kvxferd.ids import (
    AgentName,
    BootId,
    Endpoint,
    EngineId,
    Generation,
    Incarnation,
    MoverId,
    Rank,
    RegionId,
    SessionId,
)
from kvxferd.layout import EngineSpec, PackedBlocks, RankLayout, pack_ids
from kvxferd.layout.presets import attention_layout
from kvxferd.plan import Expander, decode_plan
from kvxferd.records import Record, ServedRecord
from kvxferd.wire import mover as mv
from kvxferd.wire import worker as wk
from kvxferd.wire.block_id_parts import BlockIdAssembly
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.common import Message, RankIncarnations, RankManifest, RegionAddress, TransferRef
from kvxferd.wire.limits import FENCE_PAGE_BYTES, FENCE_WORD_BYTES
from tests.support.sim.node import LIBRARY, SimNode
from tests.support.sim.schedule import Schedule

BLOCK_TOKENS = 4
# A request of 11 tokens, and where it lies at either end.
IDS, SINK_IDS, TOKENS = [3, 1, 2], [7, 9, 4], 11
# Two users.
FIRST, SECOND = 1000, 2000


@dataclass
class Worker:
    """A rank's process, or a publisher's: memory, a fence page, and what its daemon told it."""

    world: World
    host: Host
    session: SessionId
    spec: EngineSpec | None = None
    layout: RankLayout | None = None
    memory: bytearray = field(default_factory=bytearray)
    fence: bytearray = field(default_factory=lambda: bytearray(FENCE_PAGE_BYTES))
    inbox: list[Message] = field(default_factory=list)
    tickets: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    slots: Iterator[int] = field(default_factory=itertools.count)
    connected: bool = True
    receives_deliveries: bool = False  # its mover's Delivered finds room in its socket
    spoilt: bool = False  # no mover can map its fence page
    acknowledges: bool = True  # it watches each mover that it is offered
    refuses_binds: Callable[[], bool] = lambda: False  # whether its memory cannot be mapped once more
    pidfds: list[tuple[type[Message], MoverId]] = field(default_factory=list)  # and what brought them
    incarnation: str = ""  # of the present mapping
    pieces_read: list[int] = field(default_factory=list)  # up to which tokens its mover read, each time

    @property
    def known(self) -> RankIncarnations:
        """What its daemons have reported of the engine's ranks, the rank's own included."""
        known: dict[Rank, Incarnation] = {}
        for report in self.received(wk.EngineRanks):
            known |= dict(report.ranks)
        return tuple(known.items())

    def say(self, message: Message, word: bytes = b"") -> None:
        """Send a message."""
        if isinstance(message, wk.Register | wk.Resume):
            self.incarnation = message.incarnation
        self.host.feed(ev.WorkerMessage(self.session, message, None, word))

    def receive(self, effect: fx.SendToWorker) -> None:
        """Take a frame of the daemon, and reply to it as a client does."""
        message = effect.message
        if not self.connected:
            return
        self.inbox.append(message)
        if effect.pidfd_of is not None:
            self.pidfds.append((type(message), effect.pidfd_of))
        if isinstance(message, wk.MoverOffered) and self.acknowledges:
            self.world.schedule.after(0.0, self._acknowledge, message.number)
        if isinstance(message, wk.PullsInterrupted):
            self.world.schedule.after(0.0, lambda: self.resume_pulls(message.number, message.tickets))

    def _acknowledge(self, number: int) -> None:
        if self.connected:
            self.say(wk.MoverAcknowledged(number=number))

    def ready(self, transfer_id: str, ready_tokens: int = -1) -> None:
        """Say that the rank has written the transfer, or so many tokens of it, in its present memory."""
        self.say(wk.Ready(transfer_id=transfer_id, incarnation=self.incarnation, ready_tokens=ready_tokens))

    def received(self, kind: type[Message]) -> list[Message]:
        return [m for m in self.inbox if isinstance(m, kind)]

    def allocate(self) -> None:
        """Have memory for its layout, which has one region."""
        assert self.layout is not None
        self.memory = bytearray(self.layout.regions[0].size_bytes)

    def exports(self) -> tuple[wk.RegionExport, ...]:
        """Its memory, as it is exported."""
        assert self.layout is not None
        regions = enumerate(self.layout.regions)
        return tuple(wk.RegionExport(region.region, region.size_bytes, number) for number, region in regions)

    def resume(self, incarnation: str = "second", request: int = 2) -> None:
        """Wake with memory that is mapped anew."""
        self.say(wk.Resume(request=request, regions=self.exports(), incarnation=Incarnation(incarnation)))

    def over(self) -> list[tuple[str, Code]]:
        """Each transfer that is over for the session, and why."""
        found = [m for m in self.inbox if isinstance(m, wk.Released | wk.PublishRefused)]
        return [(m.transfer_id, m.why if isinstance(m, wk.Released) else m.code) for m in found]

    def publish(self, transfer_id: str, ids: list[int], num_tokens: int, **more: object) -> TransferRef:
        slot = next(self.slots)
        word = self.world.rng.randbytes(FENCE_WORD_BYTES)
        self.fence[slot * 16 : slot * 16 + 16] = word
        nonce = more.pop("nonce", None) or self.world.rng.randbytes(16).hex()
        more.setdefault("incarnations", self.known)
        spec = self.spec
        assert spec is not None
        self.say(
            wk.Publish(
                transfer_id=transfer_id,
                nonce=nonce,
                blocks={"full": PackedBlocks(pack_ids(ids))},
                num_tokens=num_tokens,
                fence_slot=slot,
                **more,
            ),
            word,
        )
        endpoint = Endpoint(spec.home or self.host.endpoint)
        return TransferRef(endpoint, spec.engine_id, spec.generation, transfer_id, nonce)

    def pull(
        self, ref: TransferRef, ids: list[int], num_tokens: int, deadline_s: float = 5.0, first: int = 0
    ) -> int:
        ticket = next(self.tickets)
        blocks = {"full": PackedBlocks(pack_ids(ids), first)}
        self.say(
            wk.PullRequest(
                ticket=ticket, ref=ref, blocks=blocks, num_tokens=num_tokens, deadline_s=deadline_s
            )
        )
        return ticket

    def reads(self, ref: TransferRef) -> bool:
        """Pull three blocks, and return whether they are delivered at once."""
        return isinstance(self.ended(self.pull(ref, SINK_IDS, TOKENS)), wk.TicketDelivered)

    def ended(self, ticket: int) -> Message | None:
        """The ticket's terminal event; more than one is a failure."""
        found = [
            m
            for m in self.inbox
            if isinstance(m, wk.TicketDelivered | wk.TicketFailed) and m.ticket == ticket
        ]
        assert len(found) <= 1, found
        return found[0] if found else None

    def resume_pulls(self, number: int, tickets: tuple[int, ...]) -> None:
        """Answer for pulls whose mover died, as a client does."""
        ended = {ticket: self.ended(ticket) for ticket in tickets}
        again = tuple(ticket for ticket, event in ended.items() if event is None)
        delivered = tuple(t for t, event in ended.items() if isinstance(event, wk.TicketDelivered))
        if self.connected:
            self.say(wk.PullsResumed(number=number, tickets=again, arrived=delivered))

    def close(self) -> None:
        self.connected = False
        self.host.feed(ev.WorkerDisconnected(self.session))

    def fill(self, ids: list[int], num_tokens: int, seed: int) -> None:
        """Write a request's content: a function of seed and global coordinates alone."""
        for offset, content in self._places(ids, num_tokens, seed):
            self.memory[offset : offset + len(content)] = content

    def num_wrong(self, ids: list[int], num_tokens: int, seed: int) -> int:
        """How many units of one token do not hold that content."""
        return sum(
            self.memory[offset : offset + len(content)] != content
            for offset, content in self._places(ids, num_tokens, seed)
        )

    def _places(self, ids: list[int], num_tokens: int, seed: int) -> Iterator[tuple[int, bytes]]:
        assert self.layout is not None
        block_tokens = self.layout.groups[0].block_tokens
        for tensor in self.layout.tensors:
            units = [u for r in tensor.units for u in range(r.start, r.stop)]
            for token, (index, unit) in itertools.product(range(num_tokens), enumerate(units)):
                offset = (
                    tensor.offset
                    + ids[token // block_tokens] * tensor.block_stride
                    + token % block_tokens * tensor.token_stride
                    + index * tensor.unit_stride
                )
                key = f"{seed}.{tensor.layer}.{tensor.component}.{unit}.{token}"
                yield offset, random.Random(key).randbytes(tensor.chunk_bytes)


@dataclass
class Mover:
    """A mover process. `hold` keeps it from working on pulls until the test steps it."""

    world: World
    host: Host
    mover: MoverId
    agent: AgentName
    worker: Worker = None  # type: ignore[assignment]  # from its offer on
    alive: bool = True
    attended: bool = False
    hold: bool = False
    last_report: mv.FromMover | None = None  # is under way to the daemon when the mover is killed
    mute: bool = False  # answers nothing: frozen
    bound_by: mv.Bind | None = None
    is_bound: bool = False
    plans: dict[str, Expander] = field(default_factory=dict)
    remotes: set[AgentName] = field(default_factory=set)
    base: int = 0
    started: deque[mv.StartPull] = field(default_factory=deque)
    copied: deque[mv.StartPull] = field(default_factory=deque)
    aborted: set[int] = field(default_factory=set)
    assembly: BlockIdAssembly = field(default_factory=BlockIdAssembly)

    def say(self, message: Message) -> None:
        if self.alive and not self.mute:
            self.host.feed(ev.MoverMessage(self.mover, message))

    def hear(self, message: Message) -> None:
        if not self.alive or self.mute:
            return
        match message:
            case mv.Bind():
                self.bound_by = message
                self._bind()
            case mv.MapFence():
                owner = self.host.workers[message.session]
                if owner.spoilt:
                    text = "cannot use a memfd that may not be written"
                    code = Code.REGION_INVALID
                    self.say(mv.FenceRefused(session=message.session, code=code, message=text))
                    return
                address = self.world.map(self, owner.fence)
                self.say(mv.FenceMapped(session=message.session, address=address, metadata=b"fence"))
            case mv.SetPolling():
                self.attended = message.on
                if message.on:
                    self.say(mv.Polling(token=message.token))
            case mv.LoadPlan():
                self.plans[message.digest] = Expander(decode_plan(message.encoded))
            case mv.DropPlan():
                del self.plans[message.digest]
            case mv.LoadRemote():
                self.remotes.add(message.agent)
            case mv.DropRemote():
                self.remotes.discard(message.agent)
            case mv.StartPull():
                local = self.assembly.complete(message.local, message.stream)
                remote = self.assembly.complete(message.remote, message.stream + 1)
                self.started.append(msgspec.structs.replace(message, local=local, remote=remote))
                if not self.hold:
                    self.work()
            case mv.AbortPull():
                self.aborted.add(message.pull)
                for start in [s for s in self.started if s.pull == message.pull and not self.hold]:
                    self.started.remove(start)
                    self._done(start, mv.PullOutcome(delivered=False, started=False))
            case mv.ReportPull():
                for start in [s for s in (*self.started, *self.copied) if s.pull == message.pull]:
                    agents = tuple(source.agent for source in start.sources if not self.hold)
                    self.say(mv.PullProgress(pull=start.pull, phase="wire", agents=agents))
            case mv.UnmapFence() | mv.ChunkMemoryGranted():
                pass
            case _:
                self.assembly.add(message)

    def _bind(self) -> None:
        if self.worker.refuses_binds():
            self.say(mv.BindRefused(code=Code.DEVICE_ERROR, message="no room"))
            return
        self.is_bound = True
        layout = self.worker.layout
        assert layout is not None
        self.base = self.world.map(self, self.worker.memory)
        region = layout.regions[0]
        address = RegionAddress(region.region, self.base, region.size_bytes)
        self.say(mv.Bound(regions=(address,), metadata=b"meta"))

    def copy(self) -> None:
        """Do all data reads of the oldest pull that has not been copied."""
        if not self.started:
            return
        start = self.started.popleft()
        expander = self.plans[start.plan]
        regions = {source.rank: {r.region: r.address for r in source.regions} for source in start.sources}
        assert {source.agent for source in start.sources} <= self.remotes, "an agent was never loaded"
        local_bases = {RegionId("kv"): self.base}
        found = expander.expand(start.local, start.remote, start.num_tokens, local_bases, regions)
        agents = {source.rank: source.agent for source in start.sources}
        for rank, runs in found.items():
            for local, remote, length in zip(*map(list, runs), strict=True):
                content = self.world.read(agents[rank], int(remote), int(length))
                if content is None:
                    code = mv.PullOutcome(
                        delivered=False, agent=agents[rank], message="gone", code=Code.TRANSPORT
                    )
                    self._done(start, code)
                    return
                at = int(local) - self.base
                self.worker.memory[at : at + int(length)] = content
        self.copied.append(start)

    def finish(self) -> None:
        """Read the fence word of the oldest copied pull and say how it ended."""
        if not self.copied:
            return
        start = self.copied.popleft()
        assert start.fence.agent in self.remotes, "the fence's agent was never loaded"
        word = self.world.read(start.fence.agent, start.fence.address, FENCE_WORD_BYTES)
        if word == start.fence.word:
            self._done(start, mv.PullOutcome(delivered=True, bytes=1, runs=1))
        else:
            self._done(
                start, mv.PullOutcome(delivered=False, code=Code.RELEASED, message="fence word changed")
            )

    def work(self) -> None:
        """Do the oldest pull to its end."""
        self.copy()
        self.finish()

    def _done(self, start: mv.StartPull, outcome: mv.PullOutcome) -> None:
        if outcome.delivered:
            self.worker.pieces_read.append(start.num_tokens)
        is_told = self.worker.receives_deliveries and start.ticket is not None
        if outcome.delivered and is_told and self.alive and not self.mute:
            assert start.ticket is not None
            if (
                self.worker.ended(start.ticket) is None
            ):  # else it is a client's Quiesced, which the daemon says too
                before = start.before or mv.PiecesRead(bytes=0, runs=0, wire_s=0.0)
                told = wk.TicketDelivered(
                    ticket=start.ticket,
                    bytes=before.bytes + outcome.bytes,
                    runs=before.runs + outcome.runs,
                    wire_s=0.0,
                )
                self.worker.inbox.append(told)
            outcome = msgspec.structs.replace(outcome, sent_to_worker=True)
        self.say(mv.PullDone(pull=start.pull, outcome=outcome))

    def die(self) -> None:
        if self.alive:
            if self.last_report is not None:
                self.say(self.last_report)
            self.alive = False
            self.world.unmap(self)
            self.host.feed(ev.MoverDied(self.mover))


class Host(SimNode):
    """One node with its workers and movers."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.endpoint = Endpoint(f"tcp://{name}:9441")
        node = Node(
            boot=BootId(f"boot-{name}-{world.take_number()}"),
            endpoint=self.endpoint,
            settings=world.settings,
            new_token=lambda: world.rng.randbytes(16).hex(),
        )
        super().__init__(node, world.schedule)
        node.feed(ev.ForkserverReady(LIBRARY), world.now)
        self.world = world
        self.workers: dict[SessionId, Worker] = {}
        self.movers: dict[MoverId, Mover] = {}
        self.records: list[Record] = []
        self.served: list[ServedRecord] = []
        self.give_movers = True

    def now(self) -> float:
        return self.world.now

    def feed(self, event: ev.Event) -> None:
        """Feed the core, and let what follows take its course, unless this daemon is dead."""
        if self.world.hosts.get(self.name) is self:
            super().feed(event)
            self.world.settle()

    # --- effects

    def send_to_worker(self, effect: fx.SendToWorker) -> None:
        if effect.pidfd_of is not None and effect.session in self.workers:
            self.movers[effect.pidfd_of].worker = self.workers[effect.session]
        if effect.pidfd_of is not None and self.name in self.world.without_descriptors:
            self.feed_soon(ev.PidfdNotSent(effect.session, effect.pidfd_of))
        elif worker := self.workers.get(effect.session):
            worker.receive(effect)

    def close_worker(self, session: SessionId) -> None:
        self.feed_soon(ev.WorkerDisconnected(session))
        self.workers[session].connected = False

    def overwrite_fence_word(self, session: SessionId, slot: int) -> None:
        self.workers[session].fence[slot * 16 : slot * 16 + 16] = self.world.rng.randbytes(16)

    def fork_mover(self, mover: MoverId, agent: AgentName) -> None:
        self.movers[mover] = self.world.mover_type(self.world, self, mover, agent)
        if self.give_movers:
            self.report_up(mover, agent)

    def accept_resident_mover(self, mover: MoverId, session: SessionId) -> None:
        self.fork_mover(mover, AgentName(f"{self.node.context.boot}/{mover}"))
        self.movers[mover].worker = self.workers[session]

    def bring_mover(self, hold: bool = False) -> Mover:
        """Have the mover come that was requested last, while `give_movers` was False."""
        mover = self.movers[max(self.movers)]
        mover.hold = hold
        self.report_up(mover.mover, mover.agent)
        self.world.settle()
        return mover

    def kill_mover(self, mover: MoverId) -> None:
        self.world.schedule.after(0.0, self.movers[mover].die)

    def send_to_mover(self, mover: MoverId, message: Message) -> None:
        self.world.schedule.after(0.0, self.movers[mover].hear, message)

    def bind_mover(self, effect: fx.BindMover) -> None:
        self.send_to_mover(effect.mover, effect.message)

    def share_fence_page(self, mover: MoverId, session: SessionId) -> None:
        self.send_to_mover(mover, mv.MapFence(session=session, size_bytes=FENCE_PAGE_BYTES))

    def send_to_peer(self, endpoint: Endpoint, message: Message) -> None:
        target = endpoint.removeprefix("tcp://").removesuffix(":9441")
        route, key = self.name.encode(), self.world.keys.get(self.name, "")
        self.world.post(self.name, target, lambda m: ev.PeerRequest(route, m, key), message)

    def reply_to_peer(self, route: bytes, message: Message) -> None:
        self.world.post(self.name, route.decode(), lambda m: ev.PeerReply(self.endpoint, m), message)

    def close_peer_connection(self, endpoint: Endpoint) -> None:
        self.world.forgotten.setdefault(self.name, []).append(endpoint)

    def emit_record(self, record: Record) -> None:
        self.records.append(record)

    def count_served(self, served: ServedRecord) -> None:
        self.served.append(served)


@dataclass
class Envelope:
    """A message under way. Encoded, as on the wire."""

    source: str
    target: str
    event: Callable[[Message], ev.Event]
    payload: bytes


class World:
    """The hosts, the network between them, and the clock."""

    host_type, worker_type, mover_type = Host, Worker, Mover

    def __init__(self, seed: int = 0, settings: Settings | None = None) -> None:
        self.rng = random.Random(seed)
        self.schedule = Schedule(100.0)
        self.settings = settings or Settings()
        self.hosts: dict[str, Host] = {}
        self.network: deque[Envelope] = deque()
        self.cut: set[tuple[str, str]] = set()
        self.hold_network = False
        self.keys: dict[str, str] = {}  # the CURVE key of each host that has one
        self.without_descriptors: set[str] = set()  # hosts that can attach no pidfd to a frame
        self.forgotten: dict[str, list[Endpoint]] = {}  # connections closed, by host
        self.receives_deliveries = False  # of workers that connect from now on, as `Worker` has it
        self._settling = False
        self._memory: dict[int, tuple[Mover, bytearray]] = {}
        self._next_address = 1 << 30
        self._numbers = itertools.count(1)

    # --- building

    def host(self, name: str) -> Host:
        self.hosts[name] = self.host_type(self, name)
        return self.hosts[name]

    def take_number(self) -> int:
        return next(self._numbers)

    def connect(self, host: Host, uid: int = 0) -> Worker:
        """A session of a user's that has greeted."""
        session = SessionId(self.take_number())
        worker = self.worker_type(self, host, session, receives_deliveries=self.receives_deliveries)
        host.workers[worker.session] = worker
        host.feed(ev.WorkerConnected(worker.session, 1, uid))
        worker.say(wk.Hello(versions=wk.WORKER_VERSIONS, client="test"))
        return worker

    def attach(self, host: Host, spec: EngineSpec, uid: int = 0) -> Worker:
        """A scheduler of the engine: it has no memory, and publishes."""
        scheduler = self.connect(host, uid)
        scheduler.spec = spec
        scheduler.say(wk.Attach(request=1, engine_id=spec.engine_id, generation=spec.generation))
        return scheduler

    def register(
        self, host: Host, spec: EngineSpec, layout: str = "HND", *, uid: int = 0, **more: int
    ) -> Worker:
        facts = {"num_kv_heads": 2, "head_dim": 2, "block_tokens": BLOCK_TOKENS, "num_blocks": 32} | more
        return self.register_with(host, spec, attention_layout(spec=spec, layout=layout, **facts), uid)

    def register_with(self, host: Host, spec: EngineSpec, layout: RankLayout, uid: int = 0) -> Worker:
        """A rank of that layout."""
        worker = self.connect(host, uid)
        worker.spec, worker.layout = spec, layout
        worker.allocate()
        self.register_again(worker)
        return worker

    def register_again(self, worker: Worker, incarnation: str = "first", request: int = 1) -> None:
        assert worker.spec is not None
        assert worker.layout is not None
        worker.say(
            wk.Register(
                request=request,
                engine=worker.spec,
                layout=worker.layout,
                regions=worker.exports(),
                incarnation=Incarnation(incarnation),
            )
        )

    def engine(self, host: Host, name: str, layout: str = "HND", **facts: int | str) -> list[Worker]:
        """Every rank of an engine, all on one host."""
        block_tokens = int(facts.pop("block_tokens", BLOCK_TOKENS))
        first = spec_of(name, **facts)
        return [
            self.register(
                host,
                msgspec.structs.replace(first, pp_rank=rank.pp_rank, tp_rank=rank.tp_rank),
                layout,
                block_tokens=block_tokens,
            )
            for rank in first.ranks()
        ]

    # --- memory

    def map(self, mover: Mover, memory: bytearray) -> int:
        address = self._next_address
        self._next_address += len(memory) + 4096
        self._memory[address] = (mover, memory)
        return address

    def unmap(self, mover: Mover) -> None:
        self._memory = {a: entry for a, entry in self._memory.items() if entry[0] is not mover}

    def read(self, agent: AgentName, address: int, length: int) -> bytes | None:
        for base, (mover, memory) in self._memory.items():
            if mover.agent == agent and base <= address and address + length <= base + len(memory):
                return bytes(memory[address - base : address - base + length])
        return None

    # --- running

    @property
    def now(self) -> float:
        return self.schedule.now

    def send_request(
        self, host: Host, message: Message, route: bytes = b"stranger", key: str = ""
    ) -> list[Message]:
        """Send as a bare peer that has proved that key; return what came back at once."""
        effects = host.node.feed(ev.PeerRequest(route, message, key), self.now)
        host.node.check_integrity()
        return [effect.message for effect in effects if getattr(effect, "route", None) == route]

    def post(self, source: str, target: str, event: Callable[[Message], ev.Event], message: Message) -> None:
        self.network.append(Envelope(source, target, event, encode(message)))

    def settle(self) -> None:
        """Let local matters take their course, and the network too unless it is held."""
        if not self._settling:
            self._run(self.now)

    def _run(self, until: float) -> None:
        """Local matters are never delayed, and messages arrive before time passes."""
        self._settling = True
        try:
            while True:
                if self.schedule.run_next(self.now):
                    continue
                if self.network and not self.hold_network:
                    self.arrive(self.network.popleft())
                elif not self.schedule.run_next(until):
                    break
        finally:
            self._settling = False

    def deliver(self) -> None:
        """Let everything that is under way arrive, and what follows from it."""
        held, self.hold_network = self.hold_network, False
        self.settle()
        self.hold_network = held

    def arrive(self, envelope: Envelope) -> None:
        host = self.hosts.get(envelope.target)
        if host is None or (envelope.source, envelope.target) in self.cut:
            return
        host.feed(envelope.event(PEER_MESSAGES.decode(envelope.payload)))
        self.settle()

    def run(self, seconds: float) -> None:
        """Let time pass, with every timer at its moment."""
        end = self.now + seconds
        self._run(end)
        self.schedule.now = end

    def advance(self, seconds: float) -> None:
        """Let time pass, also for nodes that a test has fed itself. Every node sees how late it is."""
        for host in self.hosts.values():
            host.set_timer()
        self.run(seconds)
        for host in list(self.hosts.values()):
            host.feed(ev.Tick())


def spec_of(
    name: str, *, pp: int = 1, tp: int = 1, layers: int = 2, generation: str = "g1", **more: object
) -> EngineSpec:
    """An engine's spec, as of rank (0, 0)."""
    return EngineSpec(
        EngineId(name),
        Generation(generation),
        num_layers=layers,
        pp_size=pp,
        tp_size=tp,
        num_kv_heads=2,
        **more,
    )


def delivers(source: Worker, sink: Worker, transfer_id: str = "t1") -> bool:
    """Publish three blocks, and return whether the sink has them at once."""
    return sink.reads(source.publish(transfer_id, IDS, TOKENS))


def held_pull(source: Worker, sink: Worker, deadline_s: float = 5.0) -> int:
    """Publish `t1` and pull it; the sink's mover holds that pull, and all others from now on."""
    mover_of(sink).hold = True
    return sink.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS, deadline_s)


def two_users(world: World) -> tuple[Worker, Worker]:
    """Ranks of two engines on one host, each of its own user."""
    host = world.host("d")
    first, second = (
        world.register(host, spec_of(f"decode-{number}"), uid=uid)
        for number, uid in enumerate((FIRST, SECOND), 1)
    )
    return first, second


def manifest_of(record: RankRecord) -> RankManifest:
    """Return what readers get of a rank."""
    return msgspec.msgpack.decode(record.encoded_manifest(), type=RankManifest)


def mover_of(worker: Worker) -> Mover:
    """The mover that serves a rank now: the newest, as a retired one may live still."""
    return [m for m in worker.host.movers.values() if m.worker is worker and m.alive][-1]
