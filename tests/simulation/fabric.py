"""The transfer library as the simulation has it: reads of another process's memory, which take time.

A read lands in pieces, in an order and at times of its own. What a failed read may still do is what the
transports may do: over `cma` and `tcp` nothing lands after a lost connection was reported, over `rdma` pieces
may land until the reading mover is dead.
"""

from __future__ import annotations

import ctypes
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kvxferd.ids import AgentName
from kvxferd.mover.chunks import covering, slices
from kvxferd.mover.reads import pull_engine
from kvxferd.mover.transport.base import HOST, MemoryRange, ReadHandle, ReadKinds, TransportError
from kvxferd.plan import Runs
from kvxferd.wire.limits import CHUNK_BYTES
from tests.simulation.kernel import Kernel, Process

LATEST_S = 2.0  # how late a piece of a failed read may land
REFUSED_SHARE = 0.01  # of reads are not posted: the library refuses them
OWN_SHARE = 0.1  # of what waits for a read meets one of a mover's own memory, which tries that out
AT_ONCE_SHARE = 0.1  # of reads are over when they are posted
STOPPED_POLL_S, STALLED_POLL_S = 0.01, 0.05
SEEN_S = (0.0, 2e-4, 1e-3, 5e-3)  # after which a mover that polls has seen what has happened
NUM_POSTS_KEPT = 500  # of each agent
FAILURE_SEEN_S = (1e-4, 5e-3, 3e-2)  # a failure: meanwhile pieces land

Run = tuple[int, int, int]  # local address, remote address, bytes


class Pace(StrEnum):
    """How long the pieces of reads take: cancels, deadlines and deaths meet slow ones, and leases end."""

    QUICK = "quick"
    SLOW = "slow"
    LONG = "long"


LATENCIES_S = {
    Pace.QUICK: (0.0001, 0.0003, 0.001, 0.004),
    Pace.SLOW: (0.0003, 0.004, 0.05, 0.3),
    Pace.LONG: (0.004, 0.3, 1.0, 4.0),
}


class Moment(StrEnum):
    """When a fault may meet a mover."""

    BINDING = "it has the first memory of its rank"
    READ = "it has posted a read"
    READ_DONE = "a read is over, and nobody else knows"


@dataclass(eq=False)
class Read:
    """One posted read. `done`: its mover has seen so. `late`: pieces that land although it has failed."""

    agent: AgentName
    pieces: list[list[Run]]
    num_left: int
    done: bool = False
    error: TransportError | None = None
    late: set[int] = field(default_factory=set)
    landed: set[int] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        """How many bytes it reads."""
        return sum(size for piece in self.pieces for *_, size in piece)

    @property
    def is_open(self) -> bool:
        """Whether it is under way."""
        return bool(self.num_left) and self.error is None

    @property
    def may_write(self) -> bool:
        """Whether a piece may still land."""
        return self.is_open or not self.late <= self.landed

    def to_land(self) -> Iterator[tuple[int, int]]:
        """Yield the address and size of all that may still land."""
        for index, piece in enumerate(self.pieces):
            if index not in self.landed and (self.error is None or index in self.late):
                yield from ((local, size) for local, _, size in piece)


class Post(NamedTuple):
    """When a read was posted, and from where its first run goes to where."""

    at: float
    remote: int
    local: int


class Fabric:
    """What joins all agents of an episode."""

    def __init__(self, kernel: Kernel, kind: str, pace: Pace, violate: Callable[[str, str], None]) -> None:
        self.kernel = kernel
        self.kind = kind
        self.latencies_s = LATENCIES_S[pace]
        self.violate = violate
        self.agents: dict[AgentName, SimTransport] = {}
        self.num_late = 0
        self.reads_directly = False  # no read covers several runs
        self.is_hurried = False  # no chance is taken any more
        self.num_bindings_to_refuse = 0  # so many movers cannot register memory
        self.on_strike: Callable[..., None] = lambda process, seconds=0.0: None  # its reads fail, or stall
        self.on_chunk: Callable[[SimTransport], None] = lambda transport: None  # it has one more
        self.on_moment: Callable[[Moment, SimTransport], None] = lambda moment, transport: None

    @property
    def proves_over(self) -> bool:
        """Whether a lost connection ends the reads over it."""
        return self.kind != "rdma"

    def stall(self, until: float) -> None:
        """Have no read go on."""
        for transport in self.agents.values():
            transport.stalls_until = until

    def hurry(self) -> None:
        """Have reads be quick, and refused no more."""
        self.is_hurried, self.latencies_s = True, LATENCIES_S[Pace.QUICK]
        for transport in self.agents.values():
            transport.num_to_refuse = 0


class SimTransport:
    """One agent; see `kvxferd.mover.transport.base.Transport` for the promises."""

    def __init__(self, fabric: Fabric, agent: AgentName, *, is_resident: bool = False) -> None:
        self._fabric = fabric
        self._kernel = fabric.kernel
        # A resident mover has no log of its own, and another's may not be understood.
        self._has_log = not is_resident and fabric.kernel.rng.random() < 0.5
        self._agent = agent
        self.process: Process = fabric.kernel.current.process
        self._spans: dict[int, int] = {}  # registered memory of this process: address, size
        self._remote: dict[AgentName, set[tuple[int, int]]] = {}
        self._lost: set[AgentName] = set()
        self.reads: dict[Read, None] = {}  # those that may write
        self.held: set[Read] = set()  # those that its mover has not seen fail, and has not released
        self.posts: deque[Post] = deque(maxlen=NUM_POSTS_KEPT)
        self._waiting: list[tuple[SimTransport, Read, int]] = []  # until this mover serves
        self._notes: deque[tuple[AgentName, bytes]] = deque()
        self._is_closed = False
        self._task = fabric.kernel.current  # that polls
        self.stalls_until = self.hangs_until = 0.0
        self.num_to_refuse = 0
        self.dies_slowly = self.is_silent = False  # is_silent: no read from it goes on
        fabric.agents[agent] = self
        self.process.on_death.append(self._gone)

    @property
    def agent(self) -> AgentName:
        return self._agent

    @property
    def library(self) -> str:
        return "simulated"

    # --- memory

    def register(self, span: MemoryRange) -> None:
        if len(self._spans) == 1:  # what a mover has before it has a rank is for its fence words
            self._fabric.on_moment(Moment.BINDING, self)
            if self._fabric.num_bindings_to_refuse:
                self._fabric.num_bindings_to_refuse -= 1
                self._fabric.on_strike(self.process)
                raise TransportError("cannot register memory: simulated failure", settled=True)
        self._spans[span.address] = span.size_bytes
        if span.size_bytes == CHUNK_BYTES:
            self._fabric.on_chunk(self)

    def deregister(self, span: MemoryRange) -> None:
        end = span.address + self._spans.pop(span.address)
        if any(span.address <= local < end for read in self.reads for local, _ in read.to_land()):
            self._violate("memory is deregistered while a read may write it")

    def metadata(self, spans: Sequence[MemoryRange]) -> bytes:
        return ";".join([self._agent, *(f"{span.address}+{span.size_bytes}" for span in spans)]).encode()

    def load_remote(self, metadata: bytes, agent: AgentName | None = None) -> AgentName:
        try:
            name, *spans = metadata.decode().split(";")
            found = {(int(address), int(size)) for address, size in (span.split("+") for span in spans)}
        except ValueError as error:
            raise TransportError(f"cannot load metadata: {error}", settled=True) from error
        if agent not in (None, name):
            raise TransportError("metadata of another agent", settled=True)
        self._remote.setdefault(AgentName(name), set()).update(found)
        return AgentName(name)

    def drop_remote(self, agent: AgentName) -> None:
        if any(read.agent == agent and read.is_open for read in self.reads):
            self._violate("an agent is dropped under a read")
        self._remote.pop(agent, None)
        self._lost.discard(agent)

    @property
    def num_chunks(self) -> int:
        """How many chunks it has for covering reads."""
        return [*self._spans.values()].count(CHUNK_BYTES)

    def has_any(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Whether memory in one of these ranges of addresses is registered."""
        return any(begin <= address < end for address in self._spans for begin, end in ranges)

    # --- reads

    def post(self, agent: AgentName, runs: Runs, kinds: ReadKinds = HOST) -> ReadHandle:
        known = self._remote.get(agent)
        if agent == self._agent:
            known = set(self._spans.items())
        if known is None:
            raise TransportError(f"cannot read from agent {agent}: it is not known here", settled=True)
        listed: list[Run] = list(
            zip(runs.local.tolist(), runs.remote.tolist(), runs.length.tolist(), strict=True)
        )
        self._check_size(agent, [size for *_, size in listed])
        self.posts.append(Post(self._kernel.now, listed[0][1], listed[0][0]))
        taken = sorted(one for read in self.reads for one in read.to_land())
        for local, remote, size in listed:
            before = bisect(taken, (local + size,))
            if before and sum(taken[before - 1]) > local:
                self._violate("a read is posted where another may write")
            if not any(start <= remote and remote + size <= start + length for start, length in known):
                raise TransportError(f"cannot read from agent {agent}: not registered", settled=True)
            if not self.holds(local, size):
                self._violate("a read is posted into memory that is not registered")
        if agent in self._lost:
            raise TransportError(f"cannot read from agent {agent}: it disconnected", settled=True, lost=True)
        rng = self._kernel.rng
        if self.num_to_refuse or (not self._fabric.is_hurried and rng.random() < REFUSED_SHARE):
            self.num_to_refuse = max(0, self.num_to_refuse - 1)
            self._fabric.on_strike(self.process)
            raise TransportError(f"cannot read from agent {agent}: simulated refusal", settled=True)
        read = self._cut(agent, listed)
        self.reads[read] = None
        self.held.add(read)
        source = self._fabric.agents.get(agent)
        self._reaches(Moment.READ, source)
        at_once = source is self or (
            source is not None and self._fabric.kind != "tcp" and rng.random() < AT_ONCE_SHARE
        )
        for index in range(len(read.pieces)):
            if at_once:
                self._move(read, index, is_served=True)
            else:
                self._later(read, index, rng.choice(self._fabric.latencies_s))
        read.done = not read.num_left
        return read

    def _check_size(self, agent: AgentName, sizes: Sequence[int]) -> None:
        """One post reads so little that it takes a short time."""
        most, budget = slices.MAX_DESCRIPTORS, pull_engine.SliceBudget  # type: ignore[attr-defined]
        if not self._fabric.reads_directly:
            most = max(most, covering.MAX_DESCRIPTORS)  # type: ignore[attr-defined]
        cost = sum(sizes) + len(sizes) * slices.DESCRIPTOR_COST_BYTES
        most_cost = pull_engine.ALONE_BUDGETS * budget.MAX_BYTES
        if len(sizes) > most or (len(sizes) > 1 and cost > most_cost):
            self._violate(f"{len(sizes)} descriptors of {sum(sizes)} bytes in one post from {agent}")

    def _cut(self, agent: AgentName, listed: list[Run]) -> Read:
        """Cut a read into pieces, some runs in the middle."""
        rng = self._kernel.rng
        if rng.random() < 0.3:
            at = rng.randrange(len(listed))
            local, remote, size = listed[at]
            if size > 1:
                half = rng.randrange(1, size)
                listed[at : at + 1] = [
                    (local, remote, half),
                    (local + half, remote + half, size - half),
                ]
        num_pieces = min(len(listed), rng.choice((1, 1, 2, 3)))
        if num_pieces > 1:
            rng.shuffle(listed)
        return Read(agent, [listed[index::num_pieces] for index in range(num_pieces)], num_pieces)

    def poll(self, handle: ReadHandle) -> bool:
        assert isinstance(handle, Read)
        self.progress()
        if handle not in self.held:
            self._violate("a read is polled that has ended")
        if handle.error is not None:
            self.held.discard(handle)
            raise handle.error
        handle.done = not handle.num_left
        return handle.done

    def release(self, handle: ReadHandle) -> None:
        assert isinstance(handle, Read)
        if not handle.done or handle not in self.held:
            self._violate("a read is released that is in flight, or was released")
        self.held.discard(handle)

    def progress(self) -> None:
        self._task = self._kernel.current
        if self.hangs_until > self._kernel.now and not self._is_closed:
            self._kernel.sleep(self.hangs_until - self._kernel.now)  # the library does not return
        waiting, self._waiting = self._waiting, []
        for reader, read, index in waiting:
            reader._later(read, index, self._kernel.rng.choice(self._fabric.latencies_s), is_served=True)

    def notify(self, agent: AgentName, payload: bytes) -> None:
        if (other := self._fabric.agents.get(agent)) is not None:
            other._notes.append((self._agent, payload))
            other._has_news()

    def receive_notifications(self) -> list[tuple[AgentName, bytes]]:
        self.progress()
        found = list(self._notes)
        self._notes.clear()
        return found

    def close(self) -> None:
        self._gone()

    # --- what goes wrong

    def lose_connection(self, agent: AgentName) -> bool:
        """Break the connection to an agent; return whether a read was in flight."""
        reads = [read for read in self.reads if read.agent == agent and read.is_open]
        for read in reads:
            self._fail(read, settled=self._proves_over, lost=True)
        if reads:
            self._lost.add(agent)
        return bool(reads)

    def mend(self) -> None:
        """Undo what would meet the next read."""
        self._lost.clear()
        self.stalls_until = 0.0

    def fail_one_read(self, late_share: float = 0.5, *, settled: bool = False) -> bool:
        """Have a read fail, in a way that proves nothing unless `settled`; return whether there was one.

        late_share: of the pieces that have not landed may land later.
        """
        reads = [read for read in self.reads if read.is_open]
        if reads:
            late_share = 0.0 if settled else late_share
            self._fail(self._kernel.rng.choice(reads), settled=settled, lost=False, late_share=late_share)
        return bool(reads)

    @property
    def agents_read_from(self) -> list[AgentName]:
        """From whom reads are in flight."""
        return list(dict.fromkeys(read.agent for read in self.reads if read.is_open))

    # --- inside

    @property
    def _is_halted(self) -> bool:
        """Whether nothing lands, since the process does not run: a call in the kernel and a card go on."""
        is_dying = self.process.is_dying and self._fabric.kind == "tcp"
        return (self.process.is_stopped or is_dying) and self._fabric.kind != "rdma"

    @property
    def _proves_over(self) -> bool:
        """Whether a lost connection is seen to end its reads."""
        return self._fabric.proves_over and self._has_log

    def _gone(self) -> None:
        self._is_closed = True
        self._fabric.agents.pop(self._agent, None)
        self.reads.clear()
        self.progress()

    def _later(
        self, read: Read, index: int, delay_s: float, is_served: bool = False, is_late: bool = False
    ) -> None:
        self._kernel.at(self._kernel.now + delay_s, lambda: self._move(read, index, is_served, is_late))

    def _move(self, read: Read, index: int, is_served: bool = False, is_late: bool = False) -> None:
        """Copy one piece, if the read is under way, or `is_late`: the card has not noticed that it is not."""
        if self._is_closed or self.process.is_dead or not read.num_left:
            return
        if read.error is not None and not is_late:
            return
        if self._kernel.now < self.stalls_until:
            self._fabric.on_strike(self.process, self.stalls_until - self._kernel.now)
            left_s = min(STALLED_POLL_S, self.stalls_until - self._kernel.now + 1e-6)  # it may be shortened
            self._later(read, index, left_s, is_served, is_late)
            return
        source = self._fabric.agents.get(read.agent)
        if self._is_halted or (source is not None and source.is_silent):
            self._later(read, index, STOPPED_POLL_S, is_served, is_late)
            return
        if source is None:
            if read.error is None:
                self._lost.add(read.agent)
                self._fail(read, settled=self._proves_over, lost=True)
            return
        if self._fabric.kind == "tcp" and not is_served and read.error is None:
            source._waiting.append((self, read, index))
            source._has_news()
            return
        for local, remote, size in read.pieces[index]:
            if source.holds(remote, size):
                if not self.holds(local, size):
                    self._violate("a read lands in memory that is not registered any more")
                    return
                ctypes.memmove(local, remote, size)
        read.landed.add(index)
        if read.error is not None:
            self._fabric.num_late += 1
        else:
            read.num_left -= 1
            if not read.num_left:
                self._has_news()
                self._reaches(Moment.READ_DONE, source)
        if not read.may_write:
            self.reads.pop(read, None)

    def _fail(self, read: Read, *, settled: bool, lost: bool, late_share: float = 0.5) -> None:
        self._fabric.on_strike(self.process)
        text = f"cannot read from agent {read.agent}: simulated failure"
        read.error = TransportError(text, settled=settled, lost=lost)
        self._has_news(FAILURE_SEEN_S)
        if not settled and not (lost and self._fabric.proves_over):
            rng, left = self._kernel.rng, set(range(len(read.pieces))) - read.landed
            read.late = {index for index in sorted(left) if rng.random() < late_share}
            for index in read.late:
                self._later(read, index, rng.uniform(0.0, LATEST_S), is_late=True)
        if not read.may_write:
            self.reads.pop(read, None)

    def _reaches(self, moment: Moment, source: SimTransport | None) -> None:
        if source is not self or self._kernel.rng.random() < OWN_SHARE:
            self._fabric.on_moment(moment, self)

    def _has_news(self, delays_s: Sequence[float] = SEEN_S) -> None:
        self._kernel.end_pause(self._task, self._kernel.rng.choice(delays_s))

    def holds(self, address: int, size: int) -> bool:
        """Whether this memory is registered."""
        return any(
            start <= address and address + size <= start + length for start, length in self._spans.items()
        )

    def _violate(self, text: str) -> None:
        self._fabric.violate("violations", f"{self.process.name}: {text}")
