"""One world: nodes with their daemons, engines, and all that joins them."""

from __future__ import annotations

import importlib
import logging
import os
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from msgspec.structs import replace

from kvxferd.client import connection, registration
from kvxferd.config import Config
from kvxferd.config.schema import (
    DrainConfig,
    HttpConfig,
    LimitsConfig,
    MoverConfig,
    NodeConfig,
    PeerConfig,
    TransferConfig,
    WorkerConfig,
)
from kvxferd.control import worker_socket
from kvxferd.core.limits import table as limits
from kvxferd.core.sink import stalled_sources
from kvxferd.core.source import grants
from kvxferd.ids import AgentName, Endpoint, Rank
from kvxferd.memory import driver_registry
from kvxferd.mover.chunks.slices import SliceBudget
from kvxferd.plan.covering import FormCount, always
from kvxferd.plan.read_costs import Choice, CostModel
from kvxferd.plan.stretches import StretchForm
from kvxferd.wire import block_id_parts, fd_batches, framing
from kvxferd.wire.limits import CHUNK_BYTES
from tests.simulation import interposed, libzmq, network
from tests.simulation.audit import Requests
from tests.simulation.checks import Check, Expectations, Violation
from tests.simulation.engine import Engine, EngineShape
from tests.simulation.fabric import Fabric, Moment, Pace, SimTransport
from tests.simulation.history import Heard
from tests.simulation.kernel import Kernel, Process
from tests.simulation.keys import AT_ONCE_S, READ_S, Keys
from tests.simulation.liars import NAME as LIAR
from tests.simulation.network import Network, Wire, name_of
from tests.simulation.node import Nodes
from tests.simulation.reasons import Reasons
from tests.simulation.safety import Words, mappings
from tests.simulation.store import Store
from tests.simulation.transfers import LEASE_S, MAX_HOLD_S, Pull, Transfer, Wanted
from tests.simulation.worker import LOW_LIMIT, Worker
from tests.support.fake_driver import FakeDriver

PORT = 9441
LIARS_NUMBER = 98  # it is none of the nodes that are relied on
REFUSED_S = 10.0  # so long a source is refused whose reads hang
DYING_S = (0.05, 0.6, 4.0)  # after which a mover has ended that was killed in a call of its kernel
COPY_S = (2e-5, 2e-4, 2e-3)  # that a copy of a GPU takes
DRAIN_S = 3.0  # for what is left
OWNERSHIP_S = 25.0  # of an engine's name, once its last rank has left, where all are of one node
PAGE_BYTES = 24  # of a source's block ids, where lists go in parts

_real_choose = CostModel.choose


class SmallBudget(SliceBudget):
    """The time of one to four descriptors."""

    MIN_BYTES, START_BYTES, MAX_BYTES = 20 << 10, 40 << 10, 80 << 10


# Numbers of the product that are never reached in small worlds: each low enough that it is. Those without a
# module are rows of the table of limits, or settings. Past these, honest requests may be refused.
LOW_NUMBERS: dict[str, int] = {
    "acknowledged": 24,
    "block_id_bytes": 60_000,
    "grants": 6,
    "limits.max_inflight_bytes": 2000,
    "limits.max_peers": 4,
    "owned_ranks": 4,
    "plan_bytes": 100_000,
    "early_ready": 2,
    "ended_transfers": 16,
    "open_requests": 12,
    "remote_engine_bytes": 100_000,
    "waiting_bytes": 48_000,
    "core.peers.routes MAX_ROUTES": 2,
    "core.ranks.member MAX_RELEASED": 2,
    "core.sink.manifests MAX_ENGINES_PER_PEER": 1,
    "core.sink.stalled_sources MAX_SOURCES": 1,
    "core.source.transfer_table MAX_READERS": 2,
    "core.worker_requests MAX_ABANDONING": 1,
    "core.worker_requests MAX_PREPARED": 1,
    "client.connection FENCE_SLOTS": 4,
    "client.publishes MAX_READY_RECORDS": 3,
    "client.publishes MAX_USED_IDS": 2,
    "client.pulls MAX_LIVE_PULLS": 3,
    "control.peer_inbox MAX_DEFERRED_BYTES": 2000,
    "control.worker_socket MAX_QUEUED_BYTES": 100,
}
# Past these something is done in more steps, in another way, or again; nothing is refused.
SMALL_NUMBERS: dict[str, object] = {
    "client.pulls MIN_STALE_TIMERS": 0,
    "control.peer_inbox MAX_CACHED_BYTES": 1,
    "control.peer_inbox MAX_INLINE_BYTES": 64,
    "core.context MAX_TURN_BYTES": 1,
    "core.node CALLS_PER_EVENT": 1,
    "core.node CALLS_PER_TICK": 2,
    "core.peers.manifest_checks MAX_CACHED_TENSORS": 1,
    "core.ranks.local_ranks MAX_UNACKNOWLEDGED": 2,
    "core.ranks.local_ranks OFFER_TIMEOUT_S": 0.2,
    "core.ranks.mover_pool RESIDENT_START_TIMEOUT_S": 0.5,
    "core.ranks.mover_pool START_TIMEOUT_S": 0.5,
    "core.ranks.movers MAX_PLAN_BYTES_PER_MOVER": 8192,  # less than two plans, many as they are sent
    "core.ranks.movers MAX_REMOTE_BYTES_PER_PEER": 1,
    "core.ranks.movers RETIRED_S": 0.5,
    "core.ranks.registration_checks REGISTER_BURST": 8,
    "core.sink.grants MAX_GRANTS_PER_RENEWAL": 1,
    "core.sink.plans MAX_REFUSALS": 1,
    "core.sink.pull MIN_PIECE_BYTES": 1,
    "core.source.manifests MAX_PAGE_BYTES": 1,
    "core.source.transfer_table MAX_RECORDED": 1,
    "core.views.node_view BATCH": 1,
    "frame_socket MAX_COALESCED_BYTES": 16,
    "frame_stream MAX_FRAMES_PER_TURN": 1,
    "mover.chunks.covering MAX_DESCRIPTORS": 2,
    "mover.chunks.covering MIN_ITEMS": 1,
    "mover.chunks.covering PIECE_BYTES": 1,
    "mover.chunks.device_scatter LAUNCHES_PER_STEP": 1,
    "mover.chunks.scatterer INLINE_S": 0,
    "mover.chunks.slices MAX_DESCRIPTORS": 2,
    "mover.chunks.slices MAX_RUN_BYTES": 16,
    "mover.reads.pull_engine ALONE_BUDGETS": 1,
    "mover.reads.pull_engine MAX_INFLIGHT": 2,
    "mover.reads.pull_engine MAX_INFLIGHT_PER_PULL": 1,
    "mover.reads.pull_engine MAX_PLAIN_SHIFTS": 1,
    "mover.reads.pull_engine MAX_SHORT_PULLS_IN_A_ROW": 1,
    "mover.reads.pull_engine SHORT_BYTES": 64,
    "mover.reads.pull_engine SliceBudget": SmallBudget,
    "mover.transport.buffers _LONG_RUN_BYTES": 32,
    "mover.transport.reply_agents MAX_LOADED": 1,
    "mover.transport.staging MAX_ACTIVE_CHUNKS": 1,
    "mover.transport.staging MAX_CHUNK_RUNS": 2,
    "mover.transport.staging MAX_PACKED_RUNS": 2,
    "plan.block_list_checks MAX_IDS_WITHOUT_NUMPY": 1,
    "plan.covering MAX_BLOCKS_TOGETHER": 2,
    "plan.covering MAX_RUNS": 4,
    "plan.covering MAX_REQUEST_TABLE_BYTES": 4096,
    "plan.covering MAX_SIGNATURES": 1,
    "plan.expand MAX_SHORT_RUNS": 1,
    "plan.read_costs MIN_GAIN_S": 0,
    "plan.read_costs MIN_LEARNT_S": 0,
    "plan.stretches MAX_FORMS": 1,
    "plan.stretches MAX_GAP_BYTES": 0,
    "plan.stretches MAX_LENGTHS": 1,
    "plan.stretches MAX_RUNS": 16,
    "plan.stretches MAX_STRETCH_BYTES": 8,
    "plan.stretches MAX_UNLIKE_STRETCHES": 2,
    "plan.table_cache ENTRY_DIVISOR": 1 << 20,
    "plan.topology MAX_REMOTE_ENGINES": 1,
    "resident.thread_mover MAX_RUNS_AT_ONCE": 3,
}
# Of these, what small requests alone are spared: large ones are in half of the episodes.
SHORT_WAYS = (
    "core.sink.pull MIN_PIECE_BYTES",
    "mover.reads.pull_engine SHORT_BYTES",
    "plan.block_list_checks MAX_IDS_WITHOUT_NUMPY",
    "plan.expand MAX_SHORT_RUNS",
)


@dataclass(frozen=True)
class Traits:
    """What kind of episode it is."""

    transport: str = "cma"
    pace: Pace = Pace.QUICK  # of reads
    read: str = "auto"  # or "any": some of what can be covered is
    part_bytes: int = 0  # of block ids in one message; 0: as many as usual
    send_buffer: int = 0  # of each Unix socket; 0: as usual
    io_bytes: int = 0  # that a call on one moves at most; 0: as usual
    frame_fds: int = 0  # that go with one frame at most; 0: as many as usual
    link_bytes: int = 0  # that are under way between two nodes; 0: as usual
    is_far: bool = False  # messages between nodes take long
    has_keys: bool = False  # daemons admit each other by key and address
    placement: str = "auto"  # of memory of a GPU
    lies_share: float = 0.0  # of the messages of a node that lies; 0: there is none
    staging_bytes: int = 256 << 20  # of a daemon's movers, for covering reads
    has_low_limits: bool = False
    low_numbers: tuple[str, ...] = ()  # of LOW_NUMBERS
    small_numbers: tuple[str, ...] = ()  # of SMALL_NUMBERS
    preempt_share: float = 0.0  # of the looks at the clock at which another thread takes over
    dying_share: float = 0.0  # of the movers that are killed end some time later

    @property
    def has_few_starts(self) -> bool:
        """Whether a user's movers start one after another."""
        return "core.ranks.registration_checks REGISTER_BURST" in self.small_numbers

    @property
    def defers_little(self) -> bool:
        """Whether a message behind a manifest may be refused, and is sent again two seconds later."""
        return "control.peer_inbox MAX_DEFERRED_BYTES" in self.low_numbers

    @property
    def may_be_busy(self) -> bool:
        """Whether honest requests may be too many."""
        return self.has_low_limits or bool(self.low_numbers)


@dataclass(frozen=True, eq=False)
class PlannedMessage:
    """What happens to the next message of that name about an engine between two hosts; "", None: of any."""

    delay_s: float | None  # None: it is lost
    strike: Callable[[], None] = lambda: None
    hosts: frozenset[str] | None = None
    name: str = ""
    engine: str = ""


class SimDriver(FakeDriver):
    """The tests' driver. Who waits for a copy polls it as if its pauses were short."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel

    def record(self, stream: Any) -> Any:
        self._wake()
        return super().record(stream)

    def is_done(self, event: Any) -> bool:
        is_done = super().is_done(event)
        if not is_done:
            self._wake()
        return is_done

    def _wake(self) -> None:
        task, delay_s = self._kernel.current, self._kernel.rng.choice(COPY_S)
        self._kernel.at(self._kernel.now + delay_s, lambda: self._kernel.end_pause(task, 0.0))


class World:
    """Everything that is in an episode. `rng` draws what engines do, the kernel's what happens below."""

    def __init__(
        self, seed: int, traits: Traits, node_names: list[str], shapes: list[EngineShape], keeps_story: bool
    ) -> None:
        self.rng = random.Random(seed)
        self.traits = traits
        self.node_names = node_names
        self.story: list[str] | None = [] if keeps_story else None
        self.kernel = Kernel(seed)
        interposed.install(self.kernel, seed, traits.send_buffer)
        self.kernel.preempt_share = traits.preempt_share
        self.kernel.dying_s = self._dying_s
        self.network = Network(self.kernel)
        self.network.on_send, self.network.on_shut = self._on_send, self._check_shut
        if traits.is_far:
            self.network.latencies_s = (0.002, 0.02, 0.08)
        if traits.link_bytes:
            interposed.set_on(network, "MAX_UNREAD_BYTES", traits.link_bytes)
        if traits.part_bytes:
            interposed.set_on(block_id_parts, "IDS_PART_BYTES", traits.part_bytes)
            interposed.set_on(connection, "DIRECT_BYTES", traits.part_bytes)  # it is never more
            interposed.set_on(grants, "MAX_PAGE_BYTES", PAGE_BYTES)
        if traits.frame_fds:
            for place in (fd_batches, framing, registration, worker_socket):
                interposed.set_on(place, "MAX_FDS_PER_FRAME", traits.frame_fds)
        for named in (*traits.low_numbers, *traits.small_numbers):
            module, _, name = named.rpartition(" ")
            if named.startswith("limits."):
                continue
            if module:
                number = SMALL_NUMBERS.get(named, LOW_NUMBERS.get(named))
                interposed.set_on(importlib.import_module(f"kvxferd.{module}"), name, number)
            else:
                low = limits.TABLE[named]._replace(total=LOW_NUMBERS[named])
                interposed.set_on(limits, "TABLE", {**limits.TABLE, named: low})
        interposed.set_on(stalled_sources, "REFUSED_S", REFUSED_S)
        self.network.tell = lambda what: self.tell("network", what)
        libzmq.install(self.kernel, self.network, interposed.set_on)
        self.fabric = Fabric(self.kernel, traits.transport, traits.pace, self._misused)
        self.fabric.on_moment, self.fabric.on_chunk = self._reached, self._has_chunk
        self.fabric.reads_directly = traits.read == "direct"
        if traits.read == "any":
            choose = lambda model, *given: self._choose_any(model, *given)  # noqa: E731, PLW0108  (a method)
            interposed.set_on(CostModel, "choose", choose)
        self.words, self.requests = Words(self.fabric), Requests(self)
        self.nodes = Nodes(self.kernel, self.fabric, interposed.set_on)
        self._drivers: dict[Process, FakeDriver] = {}
        interposed.set_on(driver_registry, "_open_once", lambda name: self._driver())
        self.nodes.on_broken = lambda text: self.violate(Check.INTEGRITY, text)
        self.nodes.on_many = lambda text: self.violate(Check.LIMIT, text)
        self.expectations = Expectations(self)
        self.reasons = Reasons(self)
        self.directory = Path(tempfile.mkdtemp())
        self.keys = Keys(self.directory / "keys", [*node_names, LIAR] if traits.has_keys else [], self.kernel)
        self.daemons: dict[str, Process] = {}
        self.engines: list[Engine] = []
        is_of_one_node = all(len({*shape.nodes}) == 1 for shape in shapes)
        self.forgets_owners = is_of_one_node and "owned_ranks" not in traits.low_numbers
        self.is_at_rest = False  # faults are over, and show no more; what goes wrong now does so one by one
        self.violation: Violation | None = None
        self.open_pulls: dict[Pull, None] = {}
        self.wanted: list[Wanted] = []
        self.heard: defaultdict[str, Heard] = defaultdict(Heard)  # by node
        self.unsure_counts: set[str] = set()  # nodes whose daemon was restarted, or a worker died there
        self.on_pull: Callable[[], None] = lambda: None
        self.on_warning: Callable[[str], None] = lambda text: None
        self.on_sent: Callable[[int, bytes], None] = lambda fd, content: None  # by the running process
        # What happens, and how soon, to the movers that reach a moment next.
        self.planned_at: dict[Moment, list[tuple[float, Callable[[SimTransport], None]]]]
        self.planned_at = {moment: [] for moment in Moment}
        self.planned_in_doubt: list[Callable[[Worker], None]] = []  # to the ranks whose blocks next are so
        self.planned_messages: list[PlannedMessage] = []
        self.planned_at_extend: list[Callable[[Transfer], None]] = []  # as a publisher next adds blocks
        self._numbers = 0
        self._started_at: dict[str, float] = {}
        self._install_log()
        for name in node_names:
            self.start_daemon(name)
        self.engines = [Engine(self, shape) for shape in shapes]
        for engine in self.engines:
            engine.start()

    def _choose_any(
        self,
        model: CostModel,
        forms: Iterable[FormCount],
        agents: dict[Rank, AgentName],
        can_cover: Callable[[Rank, StretchForm], bool] = always,
    ) -> Choice:
        """Cover some of what can be covered: of reads as small as these the same way pays for nearly all."""
        forms = list(forms)
        choice, covered = _real_choose(model, forms, agents, can_cover), dict[Rank, frozenset[StretchForm]]()
        for one in forms:
            if can_cover(one.rank, one.form) and self.kernel.rng.random() < 0.5:
                covered[one.rank] = covered.get(one.rank, frozenset()) | {one.form}
        choice.covered = covered
        return choice

    def _driver(self) -> FakeDriver:
        """Return the running process's driver of its GPU."""
        return self._drivers.setdefault(self.kernel.current.process, SimDriver(self.kernel))

    # --- nodes

    def host_of(self, node: str) -> str:
        """Return a node's address."""
        return f"10.0.0.{(LIARS_NUMBER if node == LIAR else self.node_names.index(node)) + 1}"

    def endpoint_of(self, node: str) -> Endpoint:
        """Return where a node's daemon is reached."""
        key = f"#{self.keys.public[node]}" if self.traits.has_keys else ""
        return Endpoint(f"{self.address_of(node)}{key}")

    def address_of(self, node: str) -> str:
        """Return where a node's daemon listens."""
        return f"tcp://{self.host_of(node)}:{PORT}"

    def socket_of(self, node: str) -> Path:
        """Return a node's worker socket."""
        return self.directory / node / "worker" / "worker.sock"

    def _config_of(self, node: str) -> Config:
        limits = LimitsConfig(staging_bytes=self.traits.staging_bytes)
        read = "auto" if self.traits.read == "any" else self.traits.read
        for named in self.traits.low_numbers:
            if named.startswith("limits."):
                limits = replace(limits, **{named.removeprefix("limits."): LOW_NUMBERS[named]})
        if self.traits.has_low_limits:
            limits = replace(limits, max_transfers_per_engine=LOW_LIMIT, max_pulls_per_rank=LOW_LIMIT)
        return Config(
            drain=DrainConfig(limit_s=DRAIN_S),
            node=NodeConfig(run_dir=str(self.directory / node)),
            http=HttpConfig(bind=""),
            worker=WorkerConfig(ownership_s=OWNERSHIP_S if self.forgets_owners else 600.0),
            peer=self._peer_config_of(node),
            transfer=TransferConfig(lease_s=LEASE_S, max_hold_s=MAX_HOLD_S),
            mover=MoverConfig(read=read, placement=self.traits.placement),  # type: ignore[arg-type]
            limits=limits,
        )

    def _peer_config_of(self, node: str) -> PeerConfig:
        bind = self.address_of(node)
        if not self.traits.has_keys:
            return PeerConfig(bind=bind)
        return PeerConfig(
            bind=bind,
            allowed_addresses=("10.0.0.0/24",),
            curve_secret_key_file=str(self.keys.secret_file(node)),
            curve_allowed_keys_file=str(self.keys.allowed_file(node)),
        )

    def start_daemon(self, node: str) -> None:
        """Start a node's daemon, unless it runs."""
        daemon = self.daemons.get(node)
        if daemon is None or daemon.is_dead:
            daemon = self.daemons[node] = self.nodes.start_daemon(node, self._config_of(node))
            daemon.io_bytes = self.traits.io_bytes
            if node in self._started_at:
                self.unsure_counts.add(node)
                for worker in [w for engine in self.engines for w in engine.workers if w.node == node]:
                    worker.expect_registered(lambda one=worker: one.is_connected or not one.is_ready)
            self._started_at[node] = self.kernel.now
            self.expectations.disturb(0.0, node)
            self.reasons.process_struck(daemon)

    def started_at(self, node: str) -> float:
        """Return when a node's daemon was started."""
        return self._started_at[node]

    def was_away(self, node: str, since: float) -> bool:
        """Whether a node's daemon has ended since then."""
        return self.daemons[node].is_dead or self._started_at[node] > since

    def kill_daemon(self, node: str) -> None:
        """Kill a node's daemon."""
        self.kernel.kill(self.daemons[node])
        self.expectations.disturb(0.0, node)
        self.reasons.daemon_is_gone(node)

    def processes_of(self, node: str) -> list[Process]:
        """Return the living processes of a node's daemon."""
        daemon = self.daemons[node]
        return [p for p in self.kernel.processes.values() if not p.is_dead and _descends(p, daemon)]

    def movers_of(self, node: str) -> list[Process]:
        """Return a node's movers."""
        return [process for process in self.processes_of(node) if " mover " in process.name]

    # --- engines

    @property
    def sources(self) -> list[Engine]:
        """Those that publish."""
        return [engine for engine in self.engines if engine.shape.is_source]

    @property
    def sinks(self) -> list[Engine]:
        """Those that pull."""
        return [engine for engine in self.engines if not engine.shape.is_source]

    @property
    def workers(self) -> list[Worker]:
        """The processes of all engines."""
        return [worker for engine in self.engines for worker in engine.workers]

    @property
    def is_ready(self) -> bool:
        """Whether every engine is registered."""
        return all(engine.is_ready for engine in self.engines)

    def take_number(self) -> int:
        """Return a number for another request's content."""
        self._numbers += 1
        return self._numbers

    def pull_started(self) -> None:
        """An engine has begun a pull."""
        self.on_pull()

    def after(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:
        """Have something happen in so many seconds, between two threads."""
        self.kernel.at(self.kernel.now + delay_s, lambda: act(*arguments))

    def holders_of(self, store: Store) -> list[SimTransport]:
        """Return the movers that may read or write a rank's memory."""
        inodes = {os.fstat(memory.fd).st_ino for memory in store.memories}
        self.kernel.lift_fd_limit()
        ranges = [(one.begin, one.end) for one in mappings() if one.inode in inodes]
        return [mover for mover in self.fabric.agents.values() if mover.has_any(ranges)]

    def _dying_s(self, process: Process) -> float:
        mover = next((t for t in self.fabric.agents.values() if t.process is process), None)
        if mover is None or process.parent is self.kernel.host or self.fabric.is_hurried:
            return 0.0
        if mover.dies_slowly:
            return DYING_S[-1]
        if self.kernel.rng.random() < self.traits.dying_share:
            return self.kernel.rng.choice(DYING_S)
        return 0.0

    # --- what is seen

    def tell(self, who: str, what: str) -> None:
        """Add to the story."""
        if self.story is not None:
            self.story.append(f"{self.kernel.now - self.kernel.began:10.6f} {who}: {what}")

    def violate(self, check: Check, text: str) -> None:
        """A promise is broken: the first one ends the episode."""
        if self.violation is None:
            self.violation = Violation(check, text)
            self.tell("oracle", str(self.violation))
            for worker in self.workers:
                self.tell("oracle", worker.describe())

    def _misused(self, kind: str, text: str) -> None:
        self.violate(Check.LIBRARY, text)

    def _install_log(self) -> None:
        """Take what the processes log: an exception in there is a bug of theirs."""
        world = self

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                world._logged(record.levelno, record.getMessage(), bool(record.exc_info), record.exc_info)

        logging.basicConfig(handlers=[Handler()], level=logging.INFO, force=True)

        def take(_: object, name: str, event: dict[str, Any]) -> str:
            has_error = bool(event.pop("exc_info", False)) or name == "exception"
            text = " ".join(f"{key}={value}" for key, value in event.items())
            world._logged(getattr(logging, name.upper(), logging.ERROR), text, has_error, True)
            raise structlog.DropEvent

        structlog.configure(
            processors=[take], wrapper_class=structlog.make_filtering_bound_logger(logging.INFO)
        )

    def _logged(self, level: int, text: str, is_exception: bool, info: Any) -> None:
        import traceback

        process = self.kernel.current.process.name
        detail = traceback.format_exc() if is_exception and self.story is not None else ""
        self.tell(f"{process} logs", f"{text} {detail}".rstrip())
        if level >= logging.WARNING:
            self.on_warning(f"{process} warns: {text}")
        if "event=worker session closed" in text:
            self._check_session_closed(text)
        if is_exception:
            self.violate(Check.NO_BUG, f"{process} logs an exception: {text}")

    def _check_session_closed(self, text: str) -> None:
        """No process of an engine sends what is out of place, though its connection may break in a frame."""
        is_own = any(f"pid={one.process.pid} " in text for one in self.workers)
        is_broken = "inside a frame" in text or "were cut off" in text
        if is_own and not is_broken and any(f"code={code} " in text for code in self.reasons.of_liars):
            self.violate(Check.REASON, text)

    # --- what goes wrong below

    def _on_send(self, wire: Wire, payload: bytes) -> float | None:
        self.words.saw(wire, payload)
        self.requests.saw(wire, payload)
        self._check_admitted(wire)
        hosts, name = frozenset((wire.dealer.host, wire.router.host)), name_of(payload)
        for planned in self.planned_messages:
            is_named = planned.name in ("", name, name.split()[0]) and planned.engine.encode() in payload
            if planned.hosts in (None, hosts) and is_named:
                self.planned_messages.remove(planned)
                planned.strike()
                return planned.delay_s
        return 0.0

    def _check_admitted(self, wire: Wire) -> None:
        """Two daemons speak with each other."""
        for node, other in self.keys.turned_away.items():
            is_theirs = {self.host_of(node), self.host_of(other)} == {wire.dealer.host, wire.router.host}
            if is_theirs and self.kernel.now > self.keys.changed_at[node] + READ_S and self._runs_well(node):
                self.violate(Check.ADMITTED, f"{node} does not admit {other}, and they speak")

    def _check_shut(self, node: str) -> None:
        """A daemon cuts all connections to it, as its list of keys has changed."""
        is_late = self.kernel.now > self.keys.changed_at[node] + AT_ONCE_S
        if node not in self.keys.turned_away and is_late and self._runs_well(node):
            self.violate(Check.ADMITTED, f"{node} admits one more, and cuts all off")

    def _runs_well(self, node: str) -> bool:
        """Whether a daemon has had the time to read its list of keys."""
        return not self.reasons.is_struck(self.kernel.now - READ_S, {("daemon", node)})

    def _reached(self, moment: Moment, transport: SimTransport) -> None:
        if planned := self.planned_at[moment]:
            delay_s, strike = planned.pop(0)
            self.after(delay_s, strike, transport)

    def _has_chunk(self, mover: SimTransport) -> None:
        """A daemon's movers together have at most as much memory for covering reads as its limit allows."""
        for daemon in self.daemons.values():
            if _descends(mover.process, daemon):
                movers = (one for one in self.fabric.agents.values() if _descends(one.process, daemon))
                num_bytes = CHUNK_BYTES * sum(one.num_chunks for one in movers)
                if num_bytes > self.traits.staging_bytes:
                    text = f"the movers of {daemon.name} have {num_bytes} bytes for covering reads"
                    self.violate(Check.LIMIT, text)

    def plan_nothing(self) -> None:
        """Forget what was to go wrong next."""
        self.planned_messages.clear()
        self.planned_in_doubt.clear()
        self.planned_at_extend.clear()
        for planned in self.planned_at.values():
            planned.clear()

    def num_fds(self) -> int:
        """Return how many descriptors the running process has."""
        self.kernel.lift_fd_limit()
        return len(os.listdir(f"/proc/self/task/{self.kernel.current.process.thread_id}/fd"))


def _descends(process: Process, of: Process) -> bool:
    return process is of or (process.parent is not None and _descends(process.parent, of))


__all__ = ["Traits", "Worker", "World"]
