"""One pull inside a mover: what is left to read, what is in flight, and why it failed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvxferd.errors import Code
from kvxferd.ids import AgentName, Rank, RegionId
from kvxferd.mover.chunks.chunk_pool import Chunk
from kvxferd.mover.chunks.covering import ChunkFill, CoverSlicer
from kvxferd.mover.chunks.scatterer import ScatterJob
from kvxferd.mover.chunks.slices import Slicer
from kvxferd.mover.reads.region_map import RegionMap, split_by_memory
from kvxferd.mover.transport.base import HOST, MemoryKind, ReadHandle, ReadKinds
from kvxferd.plan import Expander, Runs
from kvxferd.plan.covering import CoveredRank, CoverExpander
from kvxferd.plan.read_costs import PULL_S, Choice, ReadShape
from kvxferd.wire.mover import PullOutcome, StartPull


class Unposted(NamedTuple):
    """What is left to read from one remote rank, of one kind of memory, in one way."""

    agent: AgentName
    rank: Rank
    kinds: ReadKinds
    slicer: Slicer | CoverSlicer


class ChunkRead(NamedTuple):
    """What a covering read lands in, and what it reads."""

    chunk: Chunk
    fill: ChunkFill


@dataclass(slots=True, eq=False)
class PostedRead:
    """A read into the blocks, of the fence word, or into a chunk that is scattered from there."""

    agent: AgentName
    posted_at: float
    used_whole_budget: bool = False  # the slice was as large as its budgets
    num_budgets: int = 1
    shape: ReadShape | None = None  # None: nothing is to be learnt from it
    into: ChunkRead | None = None  # None: it writes where its bytes belong
    handle: ReadHandle | None = None  # None: it is not posted yet, or terminal
    scatter: ScatterJob | None = None  # of a chunk, once it is read


@dataclass(slots=True)
class PullFailure:
    """Why a pull ends without its bytes."""

    code: Code
    message: str
    at: float
    agent: AgentName | None = None


class LoadedPlan(NamedTuple):
    """What a mover has of a plan."""

    direct: Expander
    covering: CoverExpander
    # How the lists of pulls that had one run a stretch lay to one another, and the most blocks of one of
    # them. There is nothing to cover, and to find that out takes 0.3 to 0.4 ms.
    plain_shifts: dict[tuple[int, ...], int]


@dataclass(slots=True, eq=False)
class PullState:
    """State of one `StartPull` until its `PullDone`, and until none of its reads writes any more."""

    request: StartPull
    arrived_at: float
    loaded: LoadedPlan | None  # by which it is expanded: its plan may be dropped meanwhile
    was_alone: bool  # no other pull was there at any time
    # What is not expanded yet: a request of many millions of runs is expanded a part at a time.
    parts: Iterator[Mapping[Rank, Runs | CoveredRank]] | None = None
    local_bases: Mapping[RegionId, int] = field(default_factory=dict)
    unposted: deque[Unposted] = field(default_factory=deque)
    local_map: RegionMap | None = None  # None: plain host memory
    remote_maps: dict[Rank, RegionMap] = field(default_factory=dict)  # of ranks with other memory than that
    reads: list[PostedRead] = field(default_factory=list)  # in flight, or scattered
    chunk_kind: MemoryKind = HOST.local  # the memory that chunks are in
    choice: Choice | None = None  # None: of no cost model
    num_bytes_covered: int = 0  # that come through chunks, of `num_bytes`
    is_direct: bool = False  # what is not posted yet is read directly, because chunks are short
    waits_for_chunk_since: float | None = None
    failure: PullFailure | None = None
    in_doubt: bool = False  # a read failed in a way that does not prove it is over
    started: bool = False
    reported: bool = False
    fence_word_slot: int | None = None
    fence_posted_at: float | None = None
    num_bytes: int = 0
    num_runs: int = 0
    cost_bytes: int = 0  # as `Slicer.cost_bytes`
    queue_s: float | None = None  # None: it is not expanded yet
    expand_s: float = 0.0
    post_s: float = 0.0
    first_post_at: float | None = None
    data_done_at: float | None = None

    @property
    def agents(self) -> set[AgentName]:
        """All that it reads from."""
        return {self.request.fence.agent, *(source.agent for source in self.request.sources)}

    @property
    def needs_expansion(self) -> bool:
        """Whether all that was expanded is posted, and there is more to expand."""
        return self.parts is not None and not self.unposted

    @property
    def needs_fence_read(self) -> bool:
        """Whether all data is here, if there is any, and the read of the fence word is not posted."""
        if self.unposted or self.parts is not None or self.num_inflight:
            return False
        return self.failure is None and self.fence_posted_at is None and self.num_runs > 0

    @property
    def is_posted(self) -> bool:
        """Whether nothing more of it will be posted. Nothing is in flight where this is asked."""
        return not self.unposted and self.parts is None and not self.needs_fence_read

    @property
    def num_inflight(self) -> int:
        """The number of reads in flight. Chunks that are scattered do not count."""
        return len([read for read in self.reads if read.handle is not None]) if self.reads else 0

    @property
    def phase(self) -> str:
        """Where it is, as the daemon's records name it."""
        if self.queue_s is None:
            return "queue"
        if self.fence_posted_at is not None:
            return "fence"
        return "wire" if self.started else "plan"

    def awaited_agents(self) -> Iterator[AgentName]:
        """Return the agents of reads in flight."""
        return (read.agent for read in self.reads if read.handle is not None)

    def expand_next_part(self) -> None:
        """Expand the next part, or find that there is none. Raises what the expansion raises."""
        assert self.parts is not None
        part = next(self.parts, None)
        if part is None:
            self.parts = None
            return
        for rank, columns in part.items():
            if isinstance(columns, CoveredRank):
                self._add_covered(rank, columns)
            else:
                self._add_runs(rank, columns)

    def _add_runs(self, rank: Rank, runs: Runs) -> None:
        for kinds, alike in split_by_memory(runs, self.local_map, self.remote_maps.get(rank)):
            slicer = Slicer(alike)
            if not slicer.is_empty:
                self._add(rank, kinds, slicer)

    def _add_covered(self, rank: Rank, read: CoveredRank) -> None:
        for runs in read.runs:
            self._add_runs(rank, runs)
        source = next(source for source in self.request.sources if source.rank == rank)
        slicer = CoverSlicer(read.stretches, [region.address for region in source.regions])
        if slicer.is_empty:
            return
        if self.is_direct:
            for runs in slicer.rest_as_runs(self.local_bases):
                self._add_runs(rank, runs)
        else:
            kinds = self.covering_kinds(rank)
            assert kinds is not None
            self._add(rank, kinds, slicer)

    def _add(self, rank: Rank, kinds: ReadKinds, slicer: Slicer | CoverSlicer) -> None:
        self.num_bytes += slicer.num_bytes
        self.num_runs += slicer.num_runs
        self.cost_bytes += slicer.cost_bytes
        if isinstance(slicer, CoverSlicer):
            self.num_bytes_covered += slicer.num_bytes
        agent = next(source.agent for source in self.request.sources if source.rank == rank)
        self.unposted.append(Unposted(agent, rank, kinds, slicer))

    def covering_kinds(self, rank: Rank) -> ReadKinds | None:
        """Return how chunks are read from a rank, None where they cannot be."""
        remote = self.remote_maps.get(rank)
        if remote is None:
            return ReadKinds(self.chunk_kind, HOST.remote)
        kind, *others = remote.kinds
        return None if others or kind.staged else ReadKinds(self.chunk_kind, kind)

    def read_directly(self) -> None:
        """Read all that is not posted yet without chunks."""
        self.is_direct = True
        for one in tuple(self.unposted):
            if isinstance(one.slicer, CoverSlicer):
                self.unposted.remove(one)
                num_bytes, num_runs = self.num_bytes, self.num_runs
                for runs in one.slicer.rest_as_runs(self.local_bases):
                    self._add_runs(one.rank, runs)
                self.num_bytes_covered -= self.num_bytes - num_bytes
                self.num_bytes, self.num_runs = num_bytes, num_runs  # they are counted already

    def fail(self, failure: PullFailure) -> None:
        """Post nothing more. The first failure counts."""
        if self.failure is None:
            self.failure = failure
        self.unposted.clear()
        self.parts = None

    def outcome(self, now: float) -> PullOutcome:
        """Return how it ended, at `now`."""
        failure = self.failure
        data_done_at = now if self.data_done_at is None else self.data_done_at
        return PullOutcome(
            delivered=failure is None,
            started=self.started,
            finished=not (self.reads or self.in_doubt),
            quiesced_follows=not self.in_doubt,
            code=failure.code if failure else None,
            message=failure.message if failure else "",
            agent=failure.agent if failure else None,
            bytes=self.num_bytes,
            runs=self.num_runs,
            queue_s=self.queue_s or 0.0,
            expand_s=self.expand_s,
            post_s=self.post_s,
            wire_s=data_done_at - self.first_post_at if self.first_post_at is not None else 0.0,
            fence_s=now - self.fence_posted_at if self.fence_posted_at is not None else 0.0,
            covered_bytes=self.num_bytes_covered,
            predicted_s=self.choice.chosen_s + PULL_S if self.choice is not None else 0.0,
        )
