"""The pull engine: posts many pulls fairly, reads each one's fence word, says how each ended.

No I/O but the transport's. `step` is called for as long as `is_busy`; what is to be told collects
in `outbox`. What a failed read proves, and what the engine says of it:

* an address or agent that the library refuses: nothing was posted.
* a lost connection: every read from that agent is over where the transports prove that, which the daemon
  is asked (`disconnects`); else as any other failure.
* any other failure of a posted read proves nothing: the pull ends with ``finished=False`` and no
  `PullQuiet` will come, because the library has no way to ask again. Only this mover's death ends it.

A pull that failed while other reads of it are under way waits `SETTLE_S` for them, and then ends
in doubt; `PullQuiet` follows when they are terminal.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvxferd.errors import Code, DeviceError, KvxferdError
from kvxferd.ids import AgentName, Digest, PullId, RegionId
from kvxferd.mover.connecting import Connecting
from kvxferd.mover.disconnects import Disconnects
from kvxferd.mover.pull import Fault, Flight, Pull
from kvxferd.mover.remotes import Remotes
from kvxferd.mover.scratch import Scratch, word_run
from kvxferd.mover.slices import Budget
from kvxferd.mover.terrain import Terrain, is_plain
from kvxferd.mover.transport import HOST, Kinds, Transport, TransportError
from kvxferd.plan import MAX_RUNS, Expander, Runs, decode_plan
from kvxferd.wire.common import RegionAddress
from kvxferd.wire.mover import FromMover, PullDone, PullQuiet, StartPull

_LOG = logging.getLogger(__name__)

MAX_FLIGHTS = 16  # posts under way, all pulls together
MAX_FLIGHTS_PER_PULL = 3  # so that five large pulls leave room for a small one
SETTLE_S = 0.1
MAX_AHEAD = 8  # so that a stream of short pulls leaves a large one every ninth post


class PullEngine:
    """Runs the pulls of one mover. One thread."""

    def __init__(
        self,
        transport: Transport,
        clock: Callable[[], float] = time.perf_counter,
        max_runs: int = MAX_RUNS,
        disconnects: Disconnects | None = None,
    ) -> None:
        """`max_runs`: about as many runs of one pull are worked out at a time."""
        self._disconnects = Disconnects() if disconnects is None else disconnects
        self.outbox: deque[FromMover] = self._disconnects.outbox
        self.remotes = Remotes(transport)
        self._transport = transport
        self._clock = clock
        self._max_runs = max_runs
        self._scratch = Scratch(transport)
        self._connecting = Connecting(transport, self.remotes, self._scratch, self._disconnects, clock)
        self._flush: Callable[[], None] | None = None
        self._bases: Mapping[RegionId, int] = {}
        self._terrain: Terrain | None = None
        self._plans: dict[Digest, Expander] = {}
        self._budgets: dict[AgentName, Budget] = {}
        self._num_ahead = 0  # short pulls in a row that went ahead of their turn
        self._waiting: deque[Pull] = deque()
        self._reading: deque[Pull] = deque()
        self._by_id: dict[PullId, Pull] = {}

    @property
    def is_busy(self) -> bool:
        """Something is waiting or under way: call `step`."""
        return bool(self._by_id) or self._connecting.is_busy

    @property
    def num_flights(self) -> int:
        """Posts under way."""
        return sum(len(pull.flights) for pull in self._reading)

    @property
    def is_polling(self) -> bool:
        """Whether `step` asks the library about something, which drives it."""
        return self._connecting.is_busy or self.num_flights > 0

    def bind(self, regions: Sequence[RegionAddress], flush: Callable[[], None] | None = None) -> None:
        """Say where the local regions lie.

        `flush`, where a GPU asks for it, makes what was written there visible to the GPU's own work.
        Raises DeviceError.
        """
        self._flush = flush
        self._bases = {region.region: region.address for region in regions}
        self._terrain = None if is_plain(regions) else Terrain(regions)

    def load_plan(self, digest: Digest, encoded: bytes) -> None:
        """Keep a plan. One that cannot be decoded is unknown to the pulls that name it."""
        try:
            self._plans[digest] = Expander(decode_plan(encoded))
        except (KvxferdError, msgspec.DecodeError) as error:
            _LOG.error("cannot load plan %s: %s", digest, error)

    def meet(self, agent: AgentName, metadata: bytes, word: int) -> None:
        """Get to know an agent, or more of it, and connect to it if some of its host memory is known."""
        self.remotes.load(agent, metadata)
        if word:
            self._connecting.connect(agent, word)

    def drop(self, agent: AgentName) -> None:
        """Forget an agent."""
        self.remotes.drop(agent)
        self._connecting.forget(agent)

    def start(self, request: StartPull) -> None:
        """Queue a pull. Exactly one `PullDone` will come of it."""
        if request.pull in self._by_id:
            _LOG.error("cannot start pull %s: it is running", request.pull)
            return
        pull = Pull(request, self._clock())
        self._by_id[request.pull] = pull
        self._waiting.append(pull)

    def abort(self, number: PullId) -> None:
        """Post nothing more for a pull. One that has ended is no error."""
        pull = self._by_id.get(number)
        if pull is not None:
            pull.fail(Fault(Code.CANCELLED, f"pull {number} was cancelled", self._clock()))
            self._conclude(pull)

    def step(self) -> bool:
        """Move everything on by at most one expansion and one post; return whether anything moved."""
        moved = self._connecting.poll()
        for pull in tuple(self._reading):
            moved |= self._poll(pull)
        moved |= self._expand_next()
        moved |= self._expand_further()
        moved |= self._post_next()
        for pull in tuple(self._reading):
            moved |= self._conclude(pull)
        return moved

    # --- a pull's stations, in order

    def _expand_next(self) -> bool:
        if not self._waiting:
            return False
        pull = self._waiting.popleft()
        if pull.fault is None:
            pull.queue_s = self._clock() - pull.arrived_at
            self._expand(pull, self._begin)
            pull.expanded_at = self._clock()
        self._reading.append(pull)
        return True

    def _expand_further(self) -> bool:
        """Work out the next part of one pull that has posted all it had."""
        for pull in self._reading:
            if pull.needs_part:
                self._expand(pull, Pull.next_part)
                return True
        return False

    def _expand(self, pull: Pull, work: Callable[[Pull], None]) -> None:
        began = self._clock()
        try:
            work(pull)
        except KvxferdError as error:
            pull.fail(Fault(error.code, error.message, self._clock()))
        except Exception as error:
            _LOG.exception("cannot expand pull %s", pull.pull)
            pull.fail(Fault(Code.INTERNAL, f"cannot expand the plan: {error!r}", self._clock()))
        pull.expand_s += self._clock() - began

    def _begin(self, pull: Pull) -> None:
        request = pull.request
        expander = self._plans.get(request.plan)
        if expander is None:
            raise KvxferdError(f"cannot expand plan {request.plan}: it is not known here")
        remote_bases = {
            source.rank: {region.region: region.address for region in source.regions}
            for source in request.sources
        }
        pull.local = self._terrain
        pull.remote = {s.rank: Terrain(s.regions) for s in request.sources if not is_plain(s.regions)}
        pull.parts = expander.parts(
            request.local, request.remote, request.num_tokens, self._bases, remote_bases, self._max_runs
        )
        pull.next_part()

    def _post_next(self) -> bool:
        """Post one slice, of the pull that has waited longest for its turn.

        What takes no time goes ahead of that: a fence word, and short pulls, some in a row. Behind a
        large one's slices a short pull would wait for two of them, before its data and before its word.
        """
        if self.num_flights >= MAX_FLIGHTS:
            return False
        for pull in self._reading:
            if pull.awaits_fence and pull.num_runs and self._post_fence(pull):
                return True
        if self._num_ahead < MAX_AHEAD:
            for pull in self._reading:
                if pull.can_post and pull.is_short:
                    self._num_ahead += 1
                    self._post_slice(pull)
                    return True
        self._num_ahead = 0
        for _ in range(len(self._reading)):
            pull = self._reading[0]
            self._reading.rotate(-1)
            if pull.can_post and len(pull.flights) < MAX_FLIGHTS_PER_PULL:
                self._post_slice(pull)
                return True
        return False

    def _post_slice(self, pull: Pull) -> None:
        agent, kinds, slicer = pull.sources.popleft()
        budget = self._budgets.setdefault(agent, Budget())
        runs = slicer.take(budget.bytes)
        was_full = not slicer.is_empty
        if was_full:
            pull.sources.append((agent, kinds, slicer))  # the other remote ranks come first
        if pull.first_post_at is None:
            pull.first_post_at = self._clock()
        self._post(pull, agent, runs, kinds, was_full)

    def _post_fence(self, pull: Pull) -> bool:
        slot = self._scratch.take()
        if slot is None:
            return False
        fence = pull.request.fence
        pull.fence_slot = slot
        pull.fence_posted_at = self._clock()
        self._post(pull, fence.agent, word_run(slot, fence.address), HOST, was_full=False)
        return True

    def _post(self, pull: Pull, agent: AgentName, runs: Runs, kinds: Kinds, was_full: bool) -> None:
        if problem := self.remotes.prepare(agent):
            pull.fail(Fault(Code.TRANSPORT, problem, self._clock(), agent))
            return
        began = self._clock()
        self.remotes.began(agent)
        try:
            handle = self._transport.post(agent, runs, kinds)
        except Exception as error:
            pull.started |= not _refused(error)
            self._failed(pull, agent, error)
            return
        finally:
            pull.post_s += self._clock() - began
        pull.started = True
        flight = Flight(handle, agent, began, was_full)
        if handle.done:
            self._landed(pull, flight)
        else:
            pull.flights.append(flight)

    def _poll(self, pull: Pull) -> bool:
        moved = False
        for flight in tuple(pull.flights):
            try:
                if not self._transport.poll(flight.handle):
                    continue
            except Exception as error:
                pull.flights.remove(flight)
                self._failed(pull, flight.agent, error)
            else:
                pull.flights.remove(flight)
                self._landed(pull, flight)
            moved = True
        return moved

    def _landed(self, pull: Pull, flight: Flight) -> None:
        now = self._clock()
        self._transport.release(flight.handle)
        self.remotes.ended(flight.agent)
        if pull.fence_posted_at is None:
            pull.data_done_at = now
        budget = self._budgets.get(flight.agent)
        if budget is not None:
            budget.took(now - flight.posted_at, flight.was_full)

    def _failed(self, pull: Pull, agent: AgentName, error: Exception) -> None:
        if isinstance(error, TransportError):
            lost, settled, message = error.lost, error.settled, error.message
        else:
            _LOG.error("unexpected failure of the transport", exc_info=error)
            lost, settled, message = False, False, repr(error)
        self.remotes.ended(agent, lost)
        if lost:
            self._budgets.pop(agent, None)
        if lost and not settled:
            pull.num_unjudged += 1
            self._disconnects.ask(lambda over: self._judged(pull, over))
        else:
            pull.in_doubt |= not settled
        pull.fail(Fault(Code.TRANSPORT, message, self._clock(), agent))

    @staticmethod
    def _judged(pull: Pull, over: bool) -> None:
        pull.num_unjudged -= 1
        pull.in_doubt |= not over

    def _conclude(self, pull: Pull) -> bool:
        """Tell what there is to tell of a pull; forget it once it is quiet."""
        now = self._clock()
        if pull.flights or (pull.num_unjudged and not pull.in_doubt):
            fault = pull.fault
            if fault is None or fault.code is Code.CANCELLED or pull.reported or now < fault.at + SETTLE_S:
                return False
            self._report(pull, now)
            return True
        if not self._is_over(pull):
            return False
        if pull.started and not pull.is_flushed:
            self._flush_writes(pull, now)
        if pull.fault is None and pull.fence_slot is not None:
            self._compare(pull, now)
        if not pull.reported:
            self._report(pull, now)
        elif not pull.in_doubt:
            self.outbox.append(PullQuiet(pull=pull.pull))
        self._forget(pull)
        return True

    def _flush_writes(self, pull: Pull, now: float) -> None:
        """Every read is terminal. The GPU must see the bytes before the blocks are delivered or free."""
        pull.is_flushed = True
        if self._flush is None:
            return
        try:
            self._flush()
        except DeviceError as error:
            pull.in_doubt = True  # what the card has sent may not have arrived
            pull.fail(Fault(error.code, error.message, now))

    @staticmethod
    def _is_over(pull: Pull) -> bool:
        """Nothing is under way, and nothing more will be."""
        if pull.fault is not None:
            return True
        if pull.expanded_at is None or pull.sources or pull.parts is not None:
            return False
        return pull.fence_posted_at is not None or not pull.num_runs

    def _compare(self, pull: Pull, now: float) -> None:
        assert pull.fence_slot is not None
        if self._scratch.word(pull.fence_slot) != pull.request.fence.word:
            message = f"cannot deliver pull {pull.pull}: the source let go of the blocks while they were read"
            pull.fail(Fault(Code.RELEASED, message, now, pull.request.fence.agent))

    def _report(self, pull: Pull, now: float) -> None:
        pull.reported = True
        self.outbox.append(PullDone(pull=pull.pull, outcome=pull.outcome(now)))

    def _forget(self, pull: Pull) -> None:
        del self._by_id[pull.pull]
        for queue in (self._waiting, self._reading):
            if pull in queue:
                queue.remove(pull)
        if pull.fence_slot is not None and not pull.in_doubt:
            self._scratch.give_back(pull.fence_slot)


def _refused(error: Exception) -> bool:
    """The library said no before it posted anything."""
    return isinstance(error, TransportError) and error.settled and not error.lost
