"""The transfer library as data: reads land in pieces, when and in what order the episode likes.

What a failed read may do is what the transports may do: over `cma` and `tcp` nothing lands after a lost
connection was reported, over `rdma` pieces may land until the reading mover is dead.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvxferd.ids import AgentName
from kvxferd.mover.transport.base import HOST, MemoryRange, ReadHandle, ReadKinds, TransportError
from kvxferd.plan import Runs
from tests.property.simulation.agenda import Actor, Agenda
from tests.property.simulation.memory import Buffer

LATEST_S = 2.0  # how late a piece of a failed read may land
REFUSED_SHARE = 0.01  # of reads are not posted: the library refuses them
AT_ONCE_SHARE = 0.1  # of reads are over when they are posted
# Of a piece: in one episode of three a read takes so long that cancels, deadlines and deaths meet it.
QUICK_S, SLOW_S = (0.0001, 0.0003, 0.001, 0.004), (0.0003, 0.004, 0.05, 0.3)


class MoverProcess(Protocol):
    """What a transport knows of the mover that it is in."""

    @property
    def serves(self) -> bool:
        """Whether it drives the library, so that others can read from it."""

    def wake(self) -> None:
        """Have it step: a read has ended."""

    def posted(self) -> None:
        """A read was posted."""


@dataclass(eq=False)
class Read:
    """One posted read."""

    agent: AgentName
    pieces: list[list[tuple[int, int, int]]]
    num_left: int
    done: bool = False
    error: TransportError | None = None
    is_released: bool = False
    late: list[int] = field(default_factory=list)  # pieces that land although the read has failed
    landed: set[int] = field(default_factory=set)


class Fabric:
    """What joins all agents of an episode, and what goes wrong between them."""

    def __init__(self, agenda: Agenda, kind: str, rng: random.Random, is_slow: bool = False) -> None:
        self.agenda = agenda
        self.kind = kind
        self.rng = rng
        self._latencies_s = SLOW_S if is_slow else rng.choice((QUICK_S, QUICK_S, SLOW_S))
        self.agents: dict[AgentName, SimulatedTransport] = {}
        self.num_late = 0
        self.is_hurried = False
        self.on_write: Callable[[Buffer, int, int], None] = lambda buffer, offset, size: None

    @property
    def proves_over(self) -> bool:
        """Whether a lost connection ends the reads over it."""
        return self.kind != "rdma"

    def latency_s(self) -> float:
        """Return how long a piece takes."""
        return self.rng.choice(self._latencies_s)

    def hurry(self) -> None:
        """Have reads be quick from now on."""
        self.is_hurried = True
        self._latencies_s = QUICK_S


class SimulatedTransport:
    """One agent; see `Transport` for the promises."""

    def __init__(self, fabric: Fabric, agent: AgentName, process: Actor, mover: MoverProcess) -> None:
        self._fabric = fabric
        self._agent = agent
        self._process = process
        self._mover = mover
        self._places: dict[int, tuple[int, Buffer | None]] = {}  # by address: None for this process's own
        self._remote: dict[AgentName, set[tuple[int, int]]] = {}
        self._lost: set[AgentName] = set()
        self._reads: dict[Read, None] = {}
        self._all_reads: dict[Read, None] = {}  # those that were let go too, while pieces may land
        self.waiting: list[tuple[SimulatedTransport, Read, int]] = []  # until this mover serves
        self.stalls_until = 0.0
        self.num_to_refuse = 0  # of the next reads
        self.broken: AssertionError | None = None  # what a post has broken
        self.on_post: Callable[[AgentName, list[tuple[int, int, int]]], None] = lambda agent, runs: None
        self.on_doubt: Callable[[Read], None] = lambda read: None  # a read failed, and may still land
        fabric.agents[agent] = self

    @property
    def agent(self) -> AgentName:
        return self._agent

    @property
    def library(self) -> str:
        return "simulated"

    # --- memory

    def map(self, buffer: Buffer) -> int:
        """Map memory that is shared with another process; return its address here."""
        address = buffer.address
        self._places[address] = (len(buffer.bytes), buffer)
        return address

    def blank(self, address: int) -> None:
        """Have zeros where a buffer was mapped: its address stays in use."""
        size, buffer = self._places[address]
        name = "" if buffer is None else buffer.name
        self._places[address] = (size, Buffer(f"blank {name}", size))

    def maps(self, buffer: Buffer) -> bool:
        """Whether the memory is mapped here."""
        return any(one is buffer for _, one in self._places.values())

    def register(self, span: MemoryRange) -> None:
        self._places.setdefault(span.address, (span.size_bytes, None))

    def deregister(self, span: MemoryRange) -> None:
        self._places.pop(span.address, None)

    def metadata(self, spans: Sequence[MemoryRange]) -> bytes:
        return ";".join([self._agent, *(f"{span.address}+{span.size_bytes}" for span in spans)]).encode()

    def load_remote(self, metadata: bytes, agent: AgentName | None = None) -> AgentName:
        name, *spans = metadata.decode().split(";")
        assert agent in (None, name), "metadata of another agent"
        loaded = self._remote.setdefault(AgentName(name), set())
        for span in spans:
            address, _, size = span.partition("+")
            loaded.add((int(address), int(size)))
        return AgentName(name)

    def drop_remote(self, agent: AgentName) -> None:
        assert not any(read.agent == agent for read in self._reads), "an agent was dropped under a read"
        self._remote.pop(agent, None)
        self._lost.discard(agent)

    # --- reads

    def post(self, agent: AgentName, runs: Runs, kinds: ReadKinds = HOST) -> ReadHandle:
        try:
            return self._post(agent, runs)
        except AssertionError as error:
            self.broken = self.broken or error  # the engine takes it for a read that has failed
            raise

    def _post(self, agent: AgentName, runs: Runs) -> Read:
        known = self._remote.get(agent)
        if known is None:
            raise TransportError(f"cannot read from agent {agent}: it is not known here", settled=True)
        columns = zip(runs.local.tolist(), runs.remote.tolist(), runs.length.tolist(), strict=True)
        listed = list(columns)
        for local, remote, size in listed:
            if not any(start <= remote and remote + size <= start + length for start, length in known):
                raise TransportError(f"cannot read from agent {agent}: not registered", settled=True)
            self._find(local, size)
        if agent in self._lost:
            raise TransportError(f"cannot read from agent {agent}: it disconnected", settled=True, lost=True)
        rng = self._fabric.rng
        if self.num_to_refuse or (not self._fabric.is_hurried and rng.random() < REFUSED_SHARE):
            self.num_to_refuse = max(0, self.num_to_refuse - 1)
            raise TransportError(f"cannot read from agent {agent}: simulated refusal", settled=True)
        self.on_post(agent, listed)
        num_pieces = min(len(listed), rng.choice((1, 1, 2, 3)))
        if num_pieces > 1:
            rng.shuffle(listed)
        pieces = [listed[index::num_pieces] for index in range(num_pieces)]
        read = Read(agent, pieces, num_pieces)
        self._reads[read] = self._all_reads[read] = None
        source = self._fabric.agents.get(agent)
        is_at_once = source is not None and source._mover.serves and rng.random() < AT_ONCE_SHARE
        for index in range(num_pieces):
            if is_at_once:
                self._move(read, index)
            else:
                self._later(self._fabric.latency_s(), read, index)
        self._mover.posted()
        return read

    def poll(self, handle: ReadHandle) -> bool:
        assert isinstance(handle, Read)
        if handle.error is not None:
            self._reads.pop(handle, None)
            raise handle.error
        return handle.done

    def release(self, handle: ReadHandle) -> None:
        assert isinstance(handle, Read)
        assert handle.done, "a read in flight was released"
        assert not handle.is_released, "a read was released twice"
        handle.is_released = True
        self._reads.pop(handle, None)

    def progress(self) -> None:
        """See `MoverProcess.serves`."""

    def notify(self, agent: AgentName, payload: bytes) -> None:
        raise AssertionError("a mover without staged memory sends nothing to another")

    def receive_notifications(self) -> list[tuple[AgentName, bytes]]:
        return []

    def close(self) -> None:
        """The agent is gone with its process: none of its reads writes any more."""
        self._fabric.agents.pop(self._agent, None)
        self._reads.clear()
        self._all_reads.clear()
        self._places.clear()
        self.serve()

    def serve(self) -> None:
        """Let those read who waited for this mover."""
        waiting, self.waiting = self.waiting, []
        for reader, read, index in waiting:
            reader._later(self._fabric.latency_s(), read, index)

    def lose_connection(self, agent: AgentName) -> bool:
        """Break the connection to an agent; return whether a read was in flight."""
        reads = [read for read in self._reads if read.agent == agent and not read.done and not read.error]
        for read in reads:
            self._fail(read, settled=self._fabric.proves_over, lost=True)
        if reads:
            self._lost.add(agent)
        return bool(reads)

    def fail_one_read(self) -> bool:
        """Have a read fail in a way that proves nothing; return whether there was one."""
        reads = [read for read in self._reads if not read.done and read.error is None]
        if reads:
            self._fail(self._fabric.rng.choice(reads), settled=False, lost=False)
        return bool(reads)

    def stall(self, seconds: float) -> None:
        """Have all reads wait, those too that are posted meanwhile."""
        self.stalls_until = max(self.stalls_until, self._fabric.agenda.now + seconds)

    def offsets_in_flight(self, buffer: Buffer) -> Iterator[int]:
        """Return where in that memory pieces may land: of reads under way, and late ones of failed reads."""
        for read in self._all_reads:
            if read.done or (read.error is not None and (read.error.settled or not read.late)):
                continue
            for index, piece in enumerate(read.pieces):
                if (read.error is not None and index not in read.late) or index in read.landed:
                    continue
                for local, _, _ in piece:
                    found, start = self._find(local, 1)
                    if found is buffer:
                        yield local - start

    @property
    def inflight_agents(self) -> list[AgentName]:
        """From whom reads are in flight."""
        return list(dict.fromkeys(read.agent for read in self._reads if not read.done and not read.error))

    def _later(self, delay_s: float, read: Read, index: int) -> None:
        if self._fabric.kind == "rdma":  # the network card needs no process
            self._fabric.agenda.after(delay_s, self._move, read, index)
        else:
            self._process.after(delay_s, self._move, read, index)

    def _move(self, read: Read, index: int) -> None:
        """Copy one piece, if the read is still under way or the card has not noticed that it is not."""
        if not self._process.is_alive or read.done:
            return
        if read.error is not None and index not in read.late:
            return
        if self._fabric.agenda.now < self.stalls_until:
            self._later(self.stalls_until - self._fabric.agenda.now + 1e-6, read, index)
            return
        source = self._fabric.agents.get(read.agent)
        if source is None:
            if read.error is None:
                self._lost.add(read.agent)
                self._fail(read, settled=self._fabric.proves_over, lost=True)
            return
        if self._fabric.kind == "tcp" and not source._mover.serves and read.error is None:
            source.waiting.append((self, read, index))
            return
        for local, remote, size in read.pieces[index]:
            self._write(local, source._read(remote, size))
        read.landed.add(index)
        if read.error is not None:
            self._fabric.num_late += 1
            if read.landed.issuperset(read.late):
                self._all_reads.pop(read, None)
            return
        read.num_left -= 1
        if not read.num_left:
            read.done = True
            self._all_reads.pop(read, None)
            self._mover.wake()

    def _fail(self, read: Read, *, settled: bool, lost: bool) -> None:
        text = f"cannot read from agent {read.agent}: simulated failure"
        read.error = TransportError(text, settled=settled, lost=lost)
        if not settled:
            self.on_doubt(read)
            for index in range(len(read.pieces)):
                if self._fabric.rng.random() < 0.5:
                    read.late.append(index)
                    self._fabric.agenda.after(
                        self._fabric.rng.uniform(0.0, LATEST_S), self._move, read, index
                    )
        self._mover.wake()

    def _write(self, address: int, content: bytes) -> None:
        buffer, start = self._find(address, len(content))
        if buffer is None:
            ctypes.memmove(address, content, len(content))
            return
        offset = address - start
        self._fabric.on_write(buffer, offset, len(content))
        buffer.bytes[offset : offset + len(content)] = content

    def _read(self, address: int, size: int) -> bytes:
        """Return bytes that a peer reads here."""
        place, start = self._find(address, size)
        if place is None:
            return ctypes.string_at(address, size)
        return bytes(place.bytes[address - start : address - start + size])

    def _find(self, address: int, size: int) -> tuple[Buffer | None, int]:
        for start, (length, buffer) in self._places.items():
            if start <= address and address + size <= start + length:
                return buffer, start
        raise AssertionError(f"{self._process.name} uses memory that is not mapped there")
