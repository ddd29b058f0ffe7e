"""One pull inside a mover: what is left to read, what is in flight, and why it failed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvxferd.errors import Code
from kvxferd.ids import AgentName, PullId, Rank
from kvxferd.mover.process.region_map import RegionMap, split_by_memory
from kvxferd.mover.process.slices import SHORT_BYTES, Slicer
from kvxferd.mover.transport.base import ReadHandle, ReadKinds
from kvxferd.plan import Runs
from kvxferd.wire.mover import PullOutcome, StartPull


@dataclass(slots=True, eq=False)
class InflightRead:
    """A posted read."""

    handle: ReadHandle
    agent: AgentName
    posted_at: float
    used_whole_budget: bool  # the slice was as large as its budget


@dataclass(slots=True)
class PullFailure:
    """Why a pull ends without its bytes."""

    code: Code
    message: str
    at: float
    agent: AgentName | None = None


@dataclass(slots=True, eq=False)
class PullState:
    """State of one `StartPull` until its `PullDone`, and until none of its reads writes any more."""

    request: StartPull
    arrived_at: float
    # What is not expanded yet: a request of many millions of runs is expanded a part at a time.
    parts: Iterator[dict[Rank, Runs]] | None = None
    unposted: deque[tuple[AgentName, ReadKinds, Slicer]] = field(default_factory=deque)
    local_map: RegionMap | None = None  # None: plain host memory
    remote_maps: dict[Rank, RegionMap] = field(default_factory=dict)  # of ranks with other memory than that
    inflight: list[InflightRead] = field(default_factory=list)
    failure: PullFailure | None = None
    in_doubt: bool = False  # a read failed in a way that does not prove it is over
    num_awaiting_disconnect_reply: int = 0  # reads whose connection was lost, and may be over
    started: bool = False
    are_writes_flushed: bool = False  # the GPU can see what was read into its memory
    reported: bool = False
    fence_word_slot: int | None = None
    fence_posted_at: float | None = None
    num_bytes: int = 0
    num_runs: int = 0
    cost_bytes: int = 0  # as `Slicer.cost_bytes`
    expanded_at: float | None = None
    queue_s: float = 0.0
    expand_s: float = 0.0
    post_s: float = 0.0
    first_post_at: float | None = None
    data_done_at: float | None = None

    @property
    def pull_id(self) -> PullId:
        """The pull's id."""
        return self.request.pull

    @property
    def can_post(self) -> bool:
        """Whether data is left to read, and the pull has not failed."""
        return self.failure is None and bool(self.unposted)

    @property
    def is_short(self) -> bool:
        """Whether what is expanded of it takes less than half a millisecond."""
        return self.cost_bytes <= SHORT_BYTES

    @property
    def needs_expansion(self) -> bool:
        """Whether all that was expanded is posted, and there is more to expand."""
        return self.parts is not None and not self.unposted

    @property
    def needs_fence_read(self) -> bool:
        """Whether all data is here, and the read of the fence word is not posted."""
        left = self.unposted or self.parts is not None or self.inflight
        return self.failure is None and not left and self.fence_posted_at is None

    def expand_next_part(self) -> None:
        """Expand the next part, or find that there is none. Raises what the expansion raises."""
        assert self.parts is not None
        part = next(self.parts, None)
        if part is None:
            self.parts = None
            return
        agents = {source.rank: source.agent for source in self.request.sources}
        for rank, columns in part.items():
            for kinds, alike in split_by_memory(columns, self.local_map, self.remote_maps.get(rank)):
                slicer = Slicer(alike)
                if not slicer.is_empty:
                    self.num_bytes += slicer.num_bytes
                    self.num_runs += slicer.num_runs
                    self.cost_bytes += slicer.cost_bytes
                    self.unposted.append((agents[rank], kinds, slicer))

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
            finished=not self.inflight and not self.in_doubt and not self.num_awaiting_disconnect_reply,
            quiet_follows=not self.in_doubt,
            code=failure.code if failure else None,
            message=failure.message if failure else "",
            agent=failure.agent if failure else None,
            bytes=self.num_bytes,
            runs=self.num_runs,
            queue_s=self.queue_s,
            expand_s=self.expand_s,
            post_s=self.post_s,
            wire_s=data_done_at - self.first_post_at if self.first_post_at is not None else 0.0,
            fence_s=now - self.fence_posted_at if self.fence_posted_at is not None else 0.0,
        )
