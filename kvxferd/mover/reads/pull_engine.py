"""The pull engine: it posts many pulls fairly, reads each one's fence word, and reports how each ended.

It does no I/O but the transport's. `step` is called for as long as `is_busy`; messages to send collect in
`outbox`. What a failed read proves, and what the engine does about it:

* The library refuses an address or an agent: nothing was posted.
* A connection is lost: every read from that agent is over where the transports prove it (`ucx_lines`);
  otherwise it is as any other failure.
* Any other failure of a posted read proves nothing: the pull ends with ``finished=False``, and no
  `PullQuiesced` follows, because the library has no way to ask again. Only this mover's death ends the doubt.

A pull that failed while other reads of it are in flight waits `FAILED_PULL_WAIT_S` for them, and then ends
in doubt; `PullQuiesced` follows when they are terminal.

A covering read writes a chunk of the mover's own, and a scatter copies from there into the blocks. Only the
scatter counts for the blocks: a pull that has ended waits for a scatter that runs, and for no covering read,
whatever became of it. The chunk waits for the read.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from kvxferd.errors import Code, DeviceError, KvxferdError
from kvxferd.ids import AgentName, Digest, PullId, Rank, RegionId
from kvxferd.mover.chunks.chunk_pool import ChunkPool
from kvxferd.mover.chunks.covering import CoverSlicer
from kvxferd.mover.chunks.device_scatter import DeviceScatterer
from kvxferd.mover.chunks.scatterer import Scatterer
from kvxferd.mover.chunks.slices import SHORT_BYTES, SliceBudget
from kvxferd.mover.reads.covering_reads import CoveringReads
from kvxferd.mover.reads.pull_state import LoadedPlan, PostedRead, PullFailure, PullState
from kvxferd.mover.reads.region_map import RegionMap, is_plain, split_by_memory
from kvxferd.mover.reads.remote_agents import RemoteAgents
from kvxferd.mover.reads.warmup import ConnectionWarmup
from kvxferd.mover.transport.base import HOST, ReadKinds, TransportError
from kvxferd.mover.transport.buffers import WordSlots
from kvxferd.mover.transport.runs import single_run
from kvxferd.mover.transport.staging import StagedTransport
from kvxferd.plan import MAX_RUNS, Expander, Runs, decode_plan
from kvxferd.plan.covering import MAX_STRETCHES, CoveredRank, CoverExpander
from kvxferd.plan.read_costs import CostModel, ReadShape
from kvxferd.plan.stretches import StretchForm
from kvxferd.plan.table_cache import TableCache
from kvxferd.wire.common import RegionAddress
from kvxferd.wire.limits import FENCE_WORD_BYTES
from kvxferd.wire.mover import (
    MAX_AWAITED,
    FromMover,
    PullDone,
    PullProgress,
    PullQuiesced,
    ReadWay,
    StartPull,
)

_LOG = logging.getLogger(__name__)

MAX_INFLIGHT = 16  # posts in flight, all pulls together
# A post that takes longer than 16 slices of 8 ms, twice over, has a source that is stopped: it does not
# count, so that no number of pulls from one such source keeps the others waiting.
STALLED_S = 0.25
MAX_INFLIGHT_PER_PULL = 3  # so that five large pulls leave room for a small one
# Of a pull that never had another beside it: fewer posts, each shorter than the time in which a mover has to
# answer. Of pulls that come one after another, only the first waits for such a one.
ALONE_BUDGETS = 4
FAILED_PULL_WAIT_S = 0.1
MAX_PLAIN_SHIFTS = 64  # of one plan, that are remembered
# Of unequal blocks the first few may have one run a stretch. As many as this show all ways in which they lie.
PERIOD_BLOCKS = 16
MAX_SHORT_PULLS_IN_A_ROW = 8  # so that a stream of short pulls leaves a large one every ninth post


class PullEngine:
    """Runs the pulls of one mover. One thread."""

    def __init__(
        self,
        transport: StagedTransport,
        chunks: ChunkPool,
        *,
        clock: Callable[[], float] = time.perf_counter,
        max_runs: int = MAX_RUNS,
        outbox: deque[FromMover] | None = None,
        scatterer: Scatterer | None = None,
    ) -> None:
        """`chunks`: for covering reads. `max_runs`: about how many runs of a pull are expanded at a time."""
        self.outbox: deque[FromMover] = deque() if outbox is None else outbox
        self.remote_agents = RemoteAgents(transport)
        self._clock = clock
        self._max_runs = max_runs
        self._word_slots = WordSlots(transport)
        self._costs = CostModel()
        self._warmup = ConnectionWarmup(self.remote_agents, self._word_slots, clock)
        self._flush: Callable[[], None] | None = None
        self._region_addresses: Mapping[RegionId, int] = {}
        self._region_map: RegionMap | None = None
        self._tables = TableCache()
        self._plans: dict[Digest, LoadedPlan] = {}
        self._budgets: dict[AgentName, SliceBudget] = {}
        self._always_covers = False
        self._covering = CoveringReads(
            self.remote_agents,
            clock,
            chunks,
            Scatterer(clock, starts_thread=False) if scatterer is None else scatterer,
            self._costs,
        )
        self._num_short_in_a_row = 0  # posts of short pulls ahead of their turn
        self._queued: deque[PullState] = deque()
        self._active: deque[PullState] = deque()
        self._by_id: dict[PullId, PullState] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a pull, a warm-up read, or the read of a pull that has ended needs `step`."""
        return bool(self._by_id) or self._covering.is_draining or self._warmup.is_busy

    @property
    def num_inflight(self) -> int:
        """The number of posts in flight, of pulls that have not ended."""
        return sum([pull.num_inflight for pull in self._active])

    def bind(
        self,
        regions: Sequence[RegionAddress],
        flush: Callable[[], None] | None = None,
        device: DeviceScatterer | None = None,
        read_way: ReadWay = ReadWay.DIRECT,
    ) -> None:
        """Set the local regions' addresses. `device`: where all are a GPU's, and chunks may be there.

        `flush`, where a GPU needs it, makes what was written there visible to the GPU's own work. It raises
        DeviceError.
        """
        self._flush = flush
        self._region_addresses = {region.region: region.address for region in regions}
        self._region_map = None if is_plain(regions) else RegionMap(regions)
        if read_way is ReadWay.DIRECT:
            return
        # Cover whatever can be, and not only what is predicted to take less.
        self._always_covers = read_way is ReadWay.COVERING
        if device is not None:
            self._covering.bind_device(device)
        elif self._region_map is None:
            self._covering.bind(regions)

    def load_plan(self, digest: Digest, encoded: bytes) -> None:
        """Keep a plan. Where it cannot be decoded, pulls that name it fail."""
        try:
            plan = decode_plan(encoded)
            direct, covering = Expander(plan, self._tables), CoverExpander(plan, self._tables)
            self._plans[digest] = LoadedPlan(direct, covering, {})
        except (KvxferdError, msgspec.DecodeError) as error:
            _LOG.error("plan not loaded: plan=%s reason=%s", digest, error)

    def drop_plan(self, digest: Digest) -> None:
        """Forget a plan. Pulls that are here already are read by it."""
        self._plans.pop(digest, None)

    def add_remote(self, agent: AgentName, metadata: bytes, word: int) -> None:
        """Load an agent, or more of its memory. `word`: an address to read ahead of any pull, 0 for none."""
        self.remote_agents.load(agent, metadata)
        if word:
            self._warmup.start(agent, word)

    def drop_remote(self, agent: AgentName) -> None:
        """Forget an agent, once no pull needs it."""
        if self.remote_agents.drop(agent):
            self._forget_agent(agent)

    def _forget_agent(self, agent: AgentName) -> None:
        self._warmup.forget(agent)
        self._budgets.pop(agent, None)
        self._costs.forget(agent)

    def start(self, request: StartPull) -> None:
        """Queue a pull. Exactly one `PullDone` follows."""
        if request.pull in self._by_id:
            _LOG.error("pull started twice: pull=%d", request.pull)
            return
        loaded, was_alone = self._plans.get(request.plan), not self._by_id
        for other in self._by_id.values():
            other.was_alone = False
        pull = PullState(request, self._clock(), loaded, was_alone)
        self.remote_agents.acquire(pull.agents)
        self._by_id[request.pull] = pull
        self._queued.append(pull)

    def abort(self, number: PullId) -> None:
        """Post nothing more for a pull. Does nothing where it has ended."""
        pull = self._by_id.get(number)
        if pull is not None:
            pull.fail(PullFailure(Code.CANCELLED, f"pull {number} was cancelled", self._clock()))
            self._finish_if_over(pull)

    def report_progress(self, number: PullId) -> None:
        """Report what a pull waits for. Does nothing where it has ended."""
        pull = self._by_id.get(number)
        if pull is not None and not pull.reported:
            agents = tuple(dict.fromkeys(pull.awaited_agents()))[:MAX_AWAITED]
            self.outbox.append(PullProgress(pull=number, phase=pull.phase, agents=agents))

    def close(self) -> None:
        """Return once nothing here writes the blocks any more. The transport is closed."""
        self._covering.close()

    def step(self) -> bool:
        """Advance everything, by an expansion and a post or two; return whether anything advanced."""
        moved = self._warmup.poll()
        moved |= self._covering.step()
        for pull in tuple(self._active):
            moved |= self._poll(pull)
        moved |= self._expand_next()
        moved |= self._expand_more()
        moved |= self._post_next()
        for pull in tuple(self._active):
            moved |= self._finish_if_over(pull)
        # A read that is in flight is polled: over TCP its bytes come no sooner than that.
        if not moved and not self.num_inflight:
            moved = self._covering.help_scatter()
        return moved

    def _num_prompt(self) -> int:
        """Return the number of posts in flight that were posted lately."""
        since = self._clock() - STALLED_S
        reads = (read for pull in self._active for read in pull.reads if read.handle is not None)
        return sum(read.posted_at >= since for read in reads)

    # --- a pull's steps, in order

    def _expand_next(self) -> bool:
        if not self._queued:
            return False
        pull = self._queued.popleft()
        pull.queue_s = self._clock() - pull.arrived_at
        self._expand(pull, self._start_expansion)
        self._active.append(pull)
        return True

    def _expand_more(self) -> bool:
        """Expand the next part of one pull that has posted all it had."""
        for pull in self._active:
            if pull.needs_expansion:
                self._expand(pull, PullState.expand_next_part)
                return True
        return False

    def _expand(self, pull: PullState, work: Callable[[PullState], None]) -> None:
        began = self._clock()
        try:
            work(pull)
        except KvxferdError as error:
            pull.fail(PullFailure(error.code, error.message, self._clock()))
        except Exception as error:
            _LOG.exception("pull not expanded: pull=%d", pull.request.pull)
            pull.fail(PullFailure(Code.INTERNAL, f"cannot expand the plan: {error!r}", self._clock()))
        pull.expand_s += self._clock() - began

    def _start_expansion(self, pull: PullState) -> None:
        request = pull.request
        loaded, pull.loaded = pull.loaded, None
        if loaded is None:
            raise KvxferdError(f"cannot expand plan {request.plan}: it is not known here")
        remote_bases = {
            source.rank: {region.region: region.address for region in source.regions}
            for source in request.sources
        }
        pull.local_map = self._region_map
        pull.remote_maps = {s.rank: RegionMap(s.regions) for s in request.sources if not is_plain(s.regions)}
        pull.local_bases = self._region_addresses
        if (parts := self._covered_parts(pull, loaded, remote_bases)) is not None:
            pull.parts = parts
        else:
            pull.parts = loaded.direct.parts(
                request.local,
                request.remote,
                request.num_tokens,
                self._region_addresses,
                remote_bases,
                self._max_runs,
            )
        pull.expand_next_part()

    def _covered_parts(
        self,
        pull: PullState,
        loaded: LoadedPlan,
        remote_bases: Mapping[Rank, Mapping[RegionId, int]],
    ) -> Iterator[Mapping[Rank, CoveredRank]] | None:
        """Return what to read where stretches are to be covered; None where all reads are direct."""
        if not self._covering.is_available:
            return None
        shifts = loaded.plain_shifts
        lists = (*pull.request.local.values(), *pull.request.remote.values())
        shift = tuple(one.first_token - lists[0].first_token for one in lists)
        num_plain, num_blocks = shifts.get(shift, 0), max(map(len, lists))
        if num_plain >= PERIOD_BLOCKS or num_blocks <= num_plain:
            return None
        request = loaded.covering.prepare(pull.request.local, pull.request.remote)
        if request is None:
            return None
        max_stretches = min(MAX_STRETCHES, self._max_runs)
        pull.chunk_kind = self._covering.chunk_kind

        def can_cover(rank: Rank, form: StretchForm) -> bool:
            return pull.covering_kinds(rank) is not None and self._covering.can_scatter(form)

        pays = can_cover
        if not self._always_covers:
            agents = {source.rank: source.agent for source in pull.request.sources}
            forms = list(request.forms())
            if all(one.form.num_copies == 1 for one in forms) and len(shifts) < MAX_PLAIN_SHIFTS:
                shifts[shift] = max(num_blocks, num_plain)
            pull.choice = self._costs.choose(forms, agents, can_cover)
            if not pull.choice.covered:
                return None
            pays = pull.choice.pays
        return request.parts(self._region_addresses, remote_bases, pays, max_stretches, self._max_runs)

    def _post_next(self) -> bool:
        """Post one slice, of the pull that has waited longest for its turn.

        Reads that take no time go ahead of it: a fence word, and up to `MAX_SHORT_PULLS_IN_A_ROW` posts of
        short pulls. Behind a large pull's slices a short one would wait for two of them, before its data and
        before its word.
        """
        if self._num_prompt() >= MAX_INFLIGHT:
            return False
        for pull in self._active:
            if pull.needs_fence_read and self._post_fence(pull):
                return True
        if self._num_short_in_a_row < MAX_SHORT_PULLS_IN_A_ROW:
            for pull in self._active:
                if pull.unposted and pull.cost_bytes <= SHORT_BYTES and self._post_slice(pull):
                    self._num_short_in_a_row += 1
                    self._post_fence_if_read(pull)
                    return True
        self._num_short_in_a_row = 0
        for _ in range(len(self._active)):
            pull = self._active[0]
            self._active.rotate(-1)
            if pull.unposted and len(pull.reads) < MAX_INFLIGHT_PER_PULL and self._post_slice(pull):
                return True
        return False

    def _post_slice(self, pull: PullState) -> bool:
        """Post what is next of a pull; return False where that waits for a chunk, or for a staging slot.

        A pull whose source is stopped holds the slots of few agents, however many it reads.
        """
        one = pull.unposted[0]
        if one.kinds.local.staged and (
            len(pull.reads) >= MAX_INFLIGHT_PER_PULL or not self.remote_agents.can_stage(one.agent)
        ):
            return False
        pull.unposted.popleft()
        budget = self._budgets.setdefault(one.agent, SliceBudget())
        into, num_budgets = None, 1
        if isinstance(one.slicer, CoverSlicer):
            waiting = (other.waits_for_chunk_since for other in self._active if other is not pull)
            others_wait = any(since is not None for since in waiting)
            into = self._covering.next_chunk(pull, one, one.slicer, budget.bytes, others_wait)
            if into is None:
                return False
            # Of one kind of memory: where a registered piece ends, a descriptor is cut, and not the image.
            runs = into.fill.runs(into.chunk.address)
            ((_, runs),) = split_by_memory(runs, None, pull.remote_maps.get(one.rank))
        else:
            if pull.was_alone:
                num_budgets = ALONE_BUDGETS
            runs = one.slicer.next_slice(num_budgets * budget.bytes)
        was_full = not one.slicer.is_empty
        if was_full:
            pull.unposted.append(one)  # the other remote ranks come first
        # Pulls for which nothing is chosen teach nothing, and most are short.
        shape = None if pull.choice is None else ReadShape(len(runs.length), int(runs.length.sum()))
        now = self._clock()
        if pull.first_post_at is None:
            pull.first_post_at = now
        self._post(pull, PostedRead(one.agent, now, was_full, num_budgets, shape, into), runs, one.kinds)
        return True

    def _post_fence_if_read(self, pull: PullState) -> None:
        """Read the fence word at once where all data is here: within a node a short post is a copy."""
        if pull.needs_expansion:
            self._expand(pull, PullState.expand_next_part)
        if pull.needs_fence_read:
            self._post_fence(pull)

    def _post_fence(self, pull: PullState) -> bool:
        slot = self._word_slots.acquire()
        if slot is None:
            return False
        fence = pull.request.fence
        pull.fence_word_slot = slot
        pull.fence_posted_at = self._clock()
        word = single_run(slot, fence.address, FENCE_WORD_BYTES)
        self._post(pull, PostedRead(fence.agent, pull.fence_posted_at), word, HOST)
        return True

    def _post(self, pull: PullState, read: PostedRead, runs: Runs, kinds: ReadKinds) -> None:
        pull.reads.append(read)
        try:
            read.handle = self.remote_agents.post(read.agent, runs, kinds)
        except TransportError as failure:
            if read.into is None:  # else it was refused before it was posted
                pull.started |= failure.lost or not failure.settled
            self._on_read_failed(pull, read, failure)
            return
        finally:
            pull.post_s += self._clock() - read.posted_at
        pull.started |= read.into is None
        if read.handle.done:
            self._on_read_done(pull, read)

    def _poll(self, pull: PullState) -> bool:
        """Poll the reads of a pull, and scatter the chunks that are read; return whether any has advanced."""
        moved = False
        for read in tuple(pull.reads):
            if read.handle is None:
                moved |= self._covering.poll_scatter(pull, read)
                continue
            try:
                if not self.remote_agents.poll(read.agent, read.handle):
                    continue
            except TransportError as failure:
                self._on_read_failed(pull, read, failure)
            else:
                self._on_read_done(pull, read)
            moved = True
        return moved

    def _on_read_done(self, pull: PullState, read: PostedRead) -> None:
        read.handle = None
        now = self._clock()
        if pull.fence_posted_at is None:
            pull.data_done_at = now
        budget = self._budgets.get(read.agent)
        if budget is not None:
            budget.update((now - read.posted_at) / read.num_budgets, read.used_whole_budget)
        if read.shape is not None:
            self._costs.learn(read.agent, read.shape, read.posted_at, now)
        if read.into is None or pull.failure is not None:
            self._end_read(pull, read, is_over=True)
        else:
            self._covering.start_scatter(pull, read, read.into)

    def _on_read_failed(self, pull: PullState, read: PostedRead, failure: TransportError) -> None:
        self._end_read(pull, read, is_over=failure.settled)
        pull.fail(PullFailure(Code.TRANSPORT, failure.message, self._clock(), read.agent))

    def _end_read(self, pull: PullState, read: PostedRead, *, is_over: bool) -> None:
        """Forget a read that has ended. `is_over`: it can write no more, neither the blocks nor a chunk."""
        pull.reads.remove(read)
        if read.into is not None:
            self._covering.end_read(read.into.chunk, is_over=is_over)
        else:
            pull.in_doubt |= not is_over

    def _finish_if_over(self, pull: PullState) -> bool:
        """Report a pull that has ended, and forget it once none of its reads writes any more."""
        now = self._clock()
        if pull.failure is not None:
            self._covering.let_go(pull)
            for read in pull.reads:
                self.remote_agents.cancel(read.handle)
        if pull.reads:
            failure = pull.failure
            if (
                failure is None
                or failure.code is Code.CANCELLED
                or pull.reported
                or now < failure.at + FAILED_PULL_WAIT_S
            ):
                return False
            self._report(pull, now)
            return True
        if not pull.is_posted:
            return False
        if pull.started and self._flush is not None:
            self._flush_writes(pull, self._flush, now)
        if pull.fence_word_slot is not None:
            self._check_fence_word(pull, now)
        if not pull.reported:
            self._report(pull, now)
        elif not pull.in_doubt:
            self.outbox.append(PullQuiesced(pull=pull.request.pull))
        self._forget(pull)
        return True

    @staticmethod
    def _flush_writes(pull: PullState, flush: Callable[[], None], now: float) -> None:
        """Make the GPU see what was read, before the blocks are delivered or free. Every read is terminal."""
        try:
            flush()
        except DeviceError as error:
            pull.in_doubt = True  # bytes that the network card has sent may not have arrived
            pull.fail(PullFailure(error.code, error.message, now))

    def _check_fence_word(self, pull: PullState, now: float) -> None:
        assert pull.fence_word_slot is not None
        if self._word_slots.read(pull.fence_word_slot) != pull.request.fence.word:
            message = (
                f"cannot deliver pull {pull.request.pull}: the source let go of the blocks while they were "
                "read"
            )
            pull.fail(PullFailure(Code.RELEASED, message, now, pull.request.fence.agent))

    def _report(self, pull: PullState, now: float) -> None:
        pull.reported = True
        outcome = pull.outcome(now)
        self.outbox.append(PullDone(pull=pull.request.pull, outcome=outcome))
        if outcome.delivered and pull.choice is not None and pull.was_alone and not pull.is_direct:
            self._costs.learn_pull(pull.choice, outcome.wire_s)

    def _forget(self, pull: PullState) -> None:
        del self._by_id[pull.request.pull]
        for agent in self.remote_agents.release(pull.agents):
            self._forget_agent(agent)
        for queue in (self._queued, self._active):
            if pull in queue:
                queue.remove(pull)
        if pull.fence_word_slot is not None and not pull.in_doubt:
            self._word_slots.release(pull.fence_word_slot)
