"""After all faults: transfers arrive although something stands in their way, and a lost node is given up."""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from kvxferd.core.ranks.registration_checks import REGISTER_PER_S
from kvxferd.errors import Code
from kvxferd.mover.transport.staging_source import CHUNK_KEPT_S, CHUNK_REPLY_TIMEOUT_S
from kvxferd.wire.framing import HEADER
from tests.simulation.checks import Check, Violation
from tests.simulation.engine import Engine
from tests.simulation.fabric import STALLED_POLL_S, Moment, SimTransport
from tests.simulation.network import name_of
from tests.simulation.operators import Operator, cancel_transfer
from tests.simulation.reasons import SILENT_S
from tests.simulation.store import WITH_GPU, MemoryKind
from tests.simulation.transfers import MAX_HOLD_S, Pull, Transfer
from tests.simulation.worker import COMPLETED_S, MAX_DRAWS, MORE_POSTS, Worker
from tests.simulation.world import PlannedMessage

if TYPE_CHECKING:
    from tests.simulation.world import World

PULL_S = 15.0  # enough for a transfer at rest
HARD_PULL_S = 40.0  # enough for each hardship
LONG_READ_S = 9.0  # longer than a lease, and than a grant's
LEASE_S = 60.0
QUEUED_LEASE_S, QUEUE_S = 4.0, 12.0  # a queue of three leases: less than `transfers.MAX_HOLD_S`
# A source is refused whose reads have hung so often within that time, each for longer than `quiesce_s`: a
# doubt that was over sooner than the last of these had its mover replaced for another reason.
NUM_STALLS, STALLS_WINDOW_S, STALLED_DEADLINE_S, STALL_S, STALL_COUNTS_S = 3, 60.0, 1.0, 9.0, 4.4
AWAY_S, LONG_AWAY_S = (0.01, 1.0), 2.2  # the last is longer than a reader waits for it
WAITED_S = 0.3  # then a reader waits for a last step that is late
CUT_OFF_S = 0.7  # less than `peer.restart_grace_s`
LONG_CUT_OFF_S = 16.0  # longer than `peer.silent_after_s`
HANGING_PULLS = 3  # of one token each
# So a read is made of many posts, of which few are in flight.
SMALL_POSTS = {
    *MORE_POSTS, "mover.reads.pull_engine MAX_INFLIGHT", "mover.reads.pull_engine MAX_INFLIGHT_PER_PULL",
    "mover.transport.staging MAX_CHUNK_RUNS",
}  # fmt: skip
# So posts that hang fill a mover, or it knows the agents of one source alone: others are held up.
LITTLE_ROOM = {
    *MORE_POSTS, "mover.reads.pull_engine MAX_INFLIGHT", "core.ranks.movers MAX_REMOTE_BYTES_PER_PEER",
}  # fmt: skip
LONG_PULL_S = 90.0  # of a lost node's transfers: their pulls end before
REPEATED_S = 281.0  # after which transfers that have ended, or were never published, make room for others
GONE_S = 75.0  # by then nothing is known of it: longer than leases and all that is repeated
BACK_S = 60.0


class Hardship(StrEnum):
    """What stands in a transfer's way."""

    NONE = "nothing"
    SOURCE_RESTARTS = "its source's daemon restarts"
    SINK_RESTARTS = "its reader's daemon restarts"
    MOVERS_DIE = "its source's movers die"
    READERS_MOVER_DIES = "a mover of its reader dies as it reads"
    MESSAGES = "messages are lost"
    LONG_PREFILL = "its source takes long to write it"
    LONGER_PREFILL = "its source takes longer to write it than a peer may be silent"
    LONG_READ = "its read takes long"
    READ_FAILS = "its read fails"
    REQUEST_IS_CUT_OFF = "the nodes are cut off for a moment as it is asked for"
    END_IS_CUT_OFF = "the nodes are cut off for long as it has been read"
    CONNECTION_BREAKS = "the connection breaks by which it is read, or nothing proves its end"
    LONG_QUEUE = "its reader's queue is longer than its lease"
    READER_DIES = "a reader dies in whose queue it was for longer than its lease"
    READER_SLEEPS = "its reader sleeps, or leaves, as it has it"
    OTHER_HANGS = "reads from another source hang"


class Awaited(StrEnum):
    """For whom a pull waits until its deadline, by a pattern of what its message says of that."""

    DAEMON = "has sent nothing for"
    ENGINE = "look at that engine"
    SOURCE = "while it was read: (ranks?|the fence word's mover) "
    MOVER = "did not reply to this daemon; check that this node's processors are free"


class Loss(StrEnum):
    """How a node is lost."""

    IS_GONE = "is gone"
    STANDS_STILL = "stands still"
    IS_CUT_OFF = "is cut off"


# Those in which a pull may have to be repeated.
NOT_AT_ONCE = frozenset({Hardship.SOURCE_RESTARTS, Hardship.SINK_RESTARTS, Hardship.CONNECTION_BREAKS})
# From when all is written, and asked for, to when all of it is there: twice the most that was seen.
# The second: how much longer between distant nodes. The third: in small posts, of a thousand runs and more.
SOON_S, FAR_S, SMALL_POSTS_S = 0.6, 1.0, 3.0
STOPPED_S = {Hardship.LONG_PREFILL: 8.0, Hardship.LONGER_PREFILL: 14.0}
LATER_S = {
    Hardship.SOURCE_RESTARTS: 4.0, Hardship.SINK_RESTARTS: 2.0, Hardship.LONG_READ: LONG_READ_S,
    Hardship.MESSAGES: 10.0, Hardship.REQUEST_IS_CUT_OFF: 1.0, Hardship.READ_FAILS: 1.0,
    Hardship.MOVERS_DIE: 1.0, Hardship.READERS_MOVER_DIES: 0.6, Hardship.READER_SLEEPS: 1.0,
    Hardship.CONNECTION_BREAKS: 1.0,  # a pull that failed is repeated after a second
}  # fmt: skip
ENDS_WITHIN_S, ENDS_SOON_S = 2.0, 0.5  # the latter within one node: before a client looks by itself
GROWS_SHARE = 0.5  # of the transfers
LAST_STEP_IS_LATE = frozenset({
    Hardship.NONE, Hardship.LONG_PREFILL, Hardship.LONGER_PREFILL, Hardship.SOURCE_RESTARTS,
})  # fmt: skip
LAST_STEP_S = 1.2  # with those before less than a request waits for its repetition
HOME_IS_BEHIND = frozenset({
    Hardship.SOURCE_RESTARTS, Hardship.SINK_RESTARTS, Hardship.MOVERS_DIE, Hardship.READERS_MOVER_DIES,
    Hardship.REQUEST_IS_CUT_OFF, Hardship.END_IS_CUT_OFF,
})  # fmt: skip
SHORT_DEADLINE_S, LONG_WAIT_S, AWAITED_S = 2.0, 1.3, 4.0  # for whom is waited is back behind the deadline
LATE_STEP_S = MAX_HOLD_S + 10.0
NUM_AWAITED = 2  # of an episode
# By then a home has the ranks of a node whose daemon was restarted; with keys at the second attempt.
JOINED_S, JOINED_BY_KEY_S = 14.0, 3.5

Wait = Callable[..., bool]


class Overheard:
    """What daemons send each other and warn of until `end`. `to`: of requests those to one address."""

    def __init__(self, world: World, to: str = "", since: float = 0.0) -> None:
        self._world, self._to, self._since = world, to, since
        # By sender, kind, number, and what transfer it names.
        self._requests: Counter[tuple[str, str, int, str]] = Counter()
        self._warnings: list[str] = []
        self._num_frames: Counter[str] = Counter()  # by kind
        self._last_frames: dict[tuple[str, int, str], bytes] = {}  # by sender, its socket's inode, and kind
        self._repeated: list[str] = []
        world.network.on_request, world.on_warning = self._request, self._warnings.append
        world.on_sent = self._sent

    def _request(self, sender: str, address: str, payload: bytes) -> None:
        request = msgspec.msgpack.decode(payload)
        is_meant = self._to in ("", address) and self._world.kernel.now >= self._since
        if is_meant and request["t"] != "PeerHello":  # it is sent once more when its connection is there
            named = name_of(payload).removeprefix(request["t"]).strip()
            self._requests[sender, request["t"], request["request"], named] += 1

    def _sent(self, fd: int, content: bytes) -> None:
        """Note the frames that go over a Unix socket as a whole."""
        sender, inode = self._world.kernel.current.process.name, os.fstat(fd).st_ino
        while len(content) >= HEADER.size:
            length, _, zero = HEADER.unpack_from(content)
            frame, content = content[HEADER.size :][:length], content[HEADER.size + length :]
            if zero or len(frame) < length or b"\xa1t" not in frame[:4]:
                return
            kind = str(msgspec.msgpack.decode(frame)["t"])
            self._num_frames[kind] += 1
            # Else it may take back the one before. What chunks are granted is the reply to a request.
            is_repeated = self._last_frames.get((sender, inode, kind)) == frame
            if is_repeated and kind != "ChunkMemoryGranted":
                self._repeated.append(f"{sender} sends twice: {frame!r}")
            self._last_frames[sender, inode, kind] = frame

    def end(self) -> None:
        """Listen no more."""
        self._world.on_sent = lambda *_: None
        self._world.network.on_request = lambda *_: None
        self._world.on_warning = lambda _: None

    def sent_twice(self) -> list[str]:
        """Return the frames that say what the one of their kind before said, over the same socket."""
        return self._repeated

    def asked_twice(self) -> list[str]:
        """Return the requests that were sent more than once."""
        return [f"{sender} asks twice: {kind}" for (sender, kind, *_), n in self._requests.items() if n > 1]

    def warnings(self) -> list[str]:
        """Return what was warned of."""
        return self._warnings

    def too_many(self, source: Engine, sink: Engine, transfer: Transfer) -> list[str]:
        """Return of which kinds there are more requests, or frames, than the transfer takes."""
        sent = Counter(kind for _, kind, _, name in self._requests if name in ("", transfer.transfer_id))
        sent += self._num_frames
        num_steps = len(transfer.steps)
        each = {"ManifestRequest": source.num_ranks, "ReleaseGrant": 2, "StartPull": num_steps}
        if not self._world.traits.part_bytes:  # else each page of block ids is asked for
            each["GrantRequest"] = 2 + 2 * num_steps
        once = ("Acknowledge", "LoadPlan", "PullRequest", "Prepare", "TicketDelivered")
        most = {kind: each.get(kind, 1) * sink.num_ranks for kind in (*each, *once)}
        most["Publish"] = 1
        return [f"{sent[kind]} times {kind}" for kind in most if sent[kind] > most[kind]]


class Aftermath:
    """What is tried when all is at rest. `wait` lets the world go on until something is true, or so long."""

    def __init__(self, world: World, rng: random.Random, wait: Wait) -> None:
        self._world, self._rng, self._wait = world, rng, wait
        self._is_home_behind = True  # it may name movers of another node that are gone
        self._is_full = self._may_be_full

    @property
    def _may_be_full(self) -> bool:
        """Whether tables may be full of what has ended, or was reported and never published."""
        traits = self._world.traits
        return traits.has_low_limits or bool({"ended_transfers", "early_ready"} & {*traits.low_numbers})

    def check_works_again(self) -> None:
        """A transfer of each source arrives."""
        for source in self._world.sources:
            self.check_arrives(source, self._rng.choice(self._world.sinks), Hardship.NONE)

    def check_hardships(self, number: int) -> None:
        """A transfer arrives at each of so many hardships."""
        world, rng = self._world, self._rng
        for hardship in rng.sample([*Hardship], number):
            self.check_arrives(rng.choice(world.sources), rng.choice(world.sinks), hardship)

    def check_ends(self) -> None:
        """What ends a transfer is told at once, of each source once."""
        for source in self._world.sources:
            self._check_end(source)

    def check_arrives(self, source: Engine, sink: Engine, hardship: Hardship) -> None:
        """A transfer arrives: at the first attempt, where its pull need not fail."""
        world = self._world
        if self._is_full:
            self._wait(lambda: False, REPEATED_S, REPEATED_S)
        self._wait_joined()
        if hardship is Hardship.NONE:
            self._wait(lambda: False, 1.5)  # until what the last one left is over: a request, a warning
        if hardship is Hardship.CONNECTION_BREAKS and sink.shape.memory is MemoryKind.GPU:
            hardship = Hardship.READ_FAILS  # else all that its mover stages through may be in doubt
        if hardship is Hardship.SINK_RESTARTS and {*source.shape.nodes} & {*sink.shape.nodes}:
            hardship = Hardship.SOURCE_RESTARTS  # it has ranks of the source
        if (
            hardship in (Hardship.REQUEST_IS_CUT_OFF, Hardship.END_IS_CUT_OFF)
            and len({*source.shape.nodes}) > 1
        ):
            hardship = Hardship.MESSAGES  # its home asks another node's mover again, which takes two seconds
        self._is_home_behind, self._is_full = hardship in HOME_IS_BEHIND, False
        is_read_early = hardship in (Hardship.READ_FAILS, Hardship.LONGER_PREFILL)
        transfer = self._publish(source, is_read_early)
        if hardship in LAST_STEP_IS_LATE:
            transfer.last_step_s = LAST_STEP_S
        transfer.is_read_early = is_read_early
        world.tell("aftermath", f"{transfer.transfer_id} of {source.shape.name}: {hardship.value}")
        limit_s = PULL_S if hardship is Hardship.NONE else HARD_PULL_S
        self._make_hard(transfer, sink, hardship)
        if hardship in (Hardship.LONG_QUEUE, Hardship.READER_DIES):
            self._have_wait(sink, transfer, hardship is Hardship.READER_DIES)
        if not sink.is_ready:
            self._wait(lambda: sink.is_ready, BACK_S)
        sink.pull(transfer, limit_s)
        began, heard = world.kernel.now, Overheard(world)
        spans = max(len({*engine.shape.nodes}) for engine in (source, sink)) > 1

        what = f"{transfer.transfer_id} of {source.shape.name}"
        if not self._wait(lambda: self._is_delivered(transfer, sink), limit_s + 1, 0.01):
            text = f"{what} does not arrive at {sink.shape.name}, although no more than {hardship.value}"
            raise Violation(Check.WORKS_AGAIN, text)
        heard.end()
        for transport in world.fabric.agents.values():
            transport.is_silent = False
        if world.traits.may_be_busy:
            return  # of ranks that ask at once some are turned away
        soon_s = SOON_S + LATER_S.get(hardship, 0.0)
        if SMALL_POSTS & {*world.traits.small_numbers}:
            soon_s += SMALL_POSTS_S
        elif world.traits.is_far:
            soon_s += FAR_S
        if hardship is Hardship.MOVERS_DIE and world.traits.has_few_starts:
            soon_s += len(world.movers_of(source.shape.nodes[0])) / REGISTER_PER_S
        is_staged = world.traits.placement == "staged"
        if hardship is Hardship.READERS_MOVER_DIES and is_staged:
            soon_s += CHUNK_KEPT_S
        if hardship in (Hardship.SOURCE_RESTARTS, Hardship.SINK_RESTARTS) and spans:
            soon_s += JOINED_BY_KEY_S if world.traits.has_keys else JOINED_S
        elif hardship in (Hardship.SOURCE_RESTARTS, Hardship.MOVERS_DIE) and is_staged:
            soon_s += CHUNK_REPLY_TIMEOUT_S
        first = {pull.worker: pull.began for pull in reversed(transfer.pulls)}
        since = max(transfer.whole_at, began + STOPPED_S.get(hardship, 0.0), *first.values())
        if world.kernel.now > since + soon_s:
            raise Violation(Check.WORKS_AGAIN, f"{what} takes more than {soon_s:g} s: {hardship.value}")
        needless = heard.asked_twice() + heard.sent_twice() + heard.warnings()
        needless += heard.too_many(source, sink, transfer)
        if hardship is Hardship.NONE and needless:
            raise Violation(Check.QUIET, f"{what} at rest: {needless}")
        if hardship not in NOT_AT_ONCE and any(pull.wanted.attempts > 1 for pull in transfer.pulls):
            raise Violation(Check.WORKS_AGAIN, f"{sink.shape.name} had to pull twice: {hardship.value}")
        if hardship is Hardship.END_IS_CUT_OFF:
            self._wait(lambda: transfer.is_over, LONG_CUT_OFF_S + COMPLETED_S + 1.0)
        if hardship is Hardship.READER_SLEEPS and not self._wait(lambda: transfer.is_over, ENDS_WITHIN_S):
            raise Violation(Check.COMPLETED, f"{what} is not released: {hardship.value}")
        if not all(rank.is_alive for rank in sink.ranks):
            sink.die()
            sink.start()

    @staticmethod
    def _is_delivered(transfer: Transfer, sink: Engine) -> bool:
        new = {pull.wanted for pull in transfer.pulls}
        return len(new) == sink.num_ranks and all(wanted.is_delivered for wanted in new)

    def _wait_joined(self) -> None:
        """Wait until nothing of what was before stands in the way of what comes next."""
        self._world.plan_nothing()
        for transport in self._world.fabric.agents.values():
            transport.mend()
        self._wait(lambda: False, 2 * STALLED_POLL_S)
        self._wait(lambda: self._world.is_ready, BACK_S)
        if self._is_home_behind:
            self._wait(lambda: False, JOINED_S)

    def _check_end(self, source: Engine) -> None:
        """What ends a transfer is told to each rank at once, by its name."""
        world, rng = self._world, self._rng
        self._wait_joined()
        publisher = source.publisher
        others = [number for number, rank in enumerate(source.ranks) if rank is not publisher]
        reader = rng.choice(world.sinks).ranks[0]

        def give_up(transfer: Transfer) -> None:  # what it returns keeps the transfer no longer than a lease
            for act in (reader.prepare, reader.abandon):
                self._wait(lambda: False, 0.3)
                reader.do(partial(act, transfer))
            for rank in source.ranks:  # nor does what is no progress
                rank.do(partial(rank.report_again, transfer))

        ends: dict[Code, Callable[[Transfer], None]] = {
            Code.UNPUBLISHED: lambda transfer: publisher.do(lambda: publisher.unpublish(transfer)),
            Code.CANCELLED: lambda transfer: cancel_transfer(world, transfer),
            Code.SUSPENDED: lambda _: (slept := rng.choice(source.ranks)).do(slept.suspend),
            Code.ABANDONED: lambda transfer: reader.do(partial(reader.abandon, transfer)),
            Code.LEASE_EXPIRED: give_up,
        }
        if others:
            lost = rng.choice(others)
            ends[Code.RANK_LOST] = lambda _: source.ranks[lost].kill()
        for rank in source.ranks:
            rank.do(rank.report_early)
        code = rng.choice(list(ends))
        transfer = self._publish(source)
        transfer.last_step_s, transfer.is_pulled_once, transfer.is_read_early = LATE_STEP_S, True, True
        within_s = ENDS_WITHIN_S if len({*source.shape.nodes}) > 1 else ENDS_SOON_S
        if code is Code.LEASE_EXPIRED:
            transfer.lease_s, transfer.num_readers = QUEUED_LEASE_S, 2
            within_s += QUEUED_LEASE_S
        self._wait(lambda: transfer.ref is not None, PULL_S)
        self._wait(lambda: False, 0.05)  # the publish has arrived
        world.tell("aftermath", f"{transfer.transfer_id} of {source.shape.name} is to end: {code}")
        if len(transfer.steps) > 1:
            reader.engine.pull(transfer, HARD_PULL_S)
            if self._wait(lambda: transfer.is_over, 1.0):  # else they wait for the last step
                code, ends[code] = Code.COMPLETED, lambda _: None  # all that they wanted was there
        ends[code](transfer)

        def unheard() -> list[str]:
            there = [worker for worker in transfer.workers if worker.is_alive]
            return [worker.name for worker in there if worker not in transfer.released]

        what = f"{transfer.transfer_id} of {source.shape.name} ends as {code}"
        if not self._wait(lambda: not unheard(), within_s, 0.01):
            raise Violation(Check.RELEASE_HEARD, f"{what}, and {unheard()} do not hear so in {within_s:g} s")
        if not self._wait(lambda: all(pull.ended for pull in transfer.pulls), ENDS_SOON_S, 0.01):
            raise Violation(Check.READY, f"{what}, and {reader.engine.shape.name} waits for more of it")
        spans = len({*source.shape.nodes}) > 1  # of another node's rank a home knows that it has left
        also = {Code.RANK_LOST} if spans and code is Code.SUSPENDED else set()
        if wrong := {*transfer.released.values()} - {code} - also:
            raise Violation(Check.RELEASE_REASON, f"{what}, and {sorted(wrong)} is told")
        if code is Code.RANK_LOST:
            source.replace_rank(lost)

    def check_deadlines(self) -> None:
        """Pulls that end at their deadline name for whom they have waited."""
        for awaited in self._rng.sample([*Awaited], NUM_AWAITED):
            self._check_deadline(awaited)

    def _check_deadline(self, awaited: Awaited) -> None:
        """A pull that ends at its deadline names for whom it has waited, and an operator sees so before."""
        world, rng = self._world, self._rng
        self._wait_joined()
        source, sink = rng.choice(world.sources), rng.choice(world.sinks)
        home = source.shape.nodes[0]
        transfer = self._publish(source, awaited is Awaited.ENGINE)
        if (
            (awaited is Awaited.DAEMON and home in sink.shape.nodes)
            or (awaited is Awaited.ENGINE and len(transfer.steps) == 1)
            or (awaited is Awaited.MOVER and sink.shape.memory is MemoryKind.RESIDENT)
        ):
            awaited = Awaited.SOURCE
        transfer.last_step_s = LATE_STEP_S if awaited is Awaited.ENGINE else 0.0
        transfer.is_pulled_once = transfer.reads_hang = True
        self._wait(lambda: transfer.ref is not None, PULL_S)
        self._wait(lambda: False, 0.05)  # the publish has arrived
        world.tell("aftermath", f"{transfer.transfer_id} of {source.shape.name} is late: {awaited.name}")
        ends_at = world.kernel.now + AWAITED_S
        if awaited is Awaited.DAEMON:
            world.kernel.stop(world.daemons[home])
            world.after(AWAITED_S, world.kernel.resume, world.daemons[home])
        elif awaited is not Awaited.ENGINE:
            name = "stalls_until" if awaited is Awaited.SOURCE else "hangs_until"
            world.planned_at[Moment.READ].append((0.0, lambda mover: setattr(mover, name, ends_at)))
        sink.pull(transfer, SHORT_DEADLINE_S)
        self._wait(lambda: len(transfer.pulls) == sink.num_ranks, PULL_S, 0.05)
        self._wait(lambda: False, LONG_WAIT_S)
        Operator(world).look(sink.shape.nodes[0])
        pulls = [*transfer.pulls]
        # A progressive one may wait for its source, and is read in pieces of some tenths of a second.
        late_s = 1.5 + (MAX_HOLD_S if awaited in (Awaited.DAEMON, Awaited.ENGINE) else 0.0)
        if not self._wait(lambda: all(pull.ended for pull in pulls), SHORT_DEADLINE_S + late_s, 0.05):
            raise Violation(
                Check.DEADLINE, f"pulls of {sink.shape.name} were late for {awaited.name}, and go on"
            )
        Operator(world).look(sink.shape.nodes[0])
        for pull in pulls:
            says = awaited.value
            if awaited is Awaited.MOVER and source.shape.memory in WITH_GPU:
                says += f"|{Awaited.SOURCE}"  # the one that hangs may have all of its slots
            if pull.why and not re.search(says, pull.why):
                text = f"the pull of {pull.worker.name} was late for {awaited.name}, and says: {pull.why!r}"
                raise Violation(Check.REASON, text)
        if not transfer.is_over:  # its blocks are the next one's
            transfer.publisher.do(lambda: transfer.publisher.unpublish(transfer))

        def is_past() -> bool:  # the next is for another's lateness
            return world.kernel.now > ends_at and transfer.transfer_id not in source.transfers

        self._wait(is_past, AWAITED_S)

    def check_stalls(self) -> None:
        """A source whose reads hang again and again is refused at once, for a while, and no sooner."""
        world, source = self._world, self._rng.choice(self._world.sources)
        alone = [one for one in world.sinks if len({*one.shape.nodes}) == 1]
        sinks = [one for one in alone if one.shape.memory not in WITH_GPU]
        # Where a read lands in a buffer, it leaves no blocks in doubt.
        if source.shape.memory in WITH_GPU or world.traits.read in ("covering", "any") or not sinks:
            return
        sink, num_stalls = self._rng.choice(sinks), 0
        self._wait(lambda: False, STALLS_WINDOW_S)
        self._wait_joined()
        ends_at = world.kernel.now + STALLS_WINDOW_S - 2 * STALL_S
        while world.kernel.now < ends_at or num_stalls == NUM_STALLS:
            pulls, took_s, doubt_s = self._pull_hanging(source, sink)
            found = [re.search("did not end; .* try again in ([0-9]+) s", pull.why) for pull in pulls]
            refused = [float(one[1]) for one in found if one is not None]
            if bool(refused) is not (num_stalls == NUM_STALLS) or (refused and took_s > ENDS_SOON_S):
                text = f"{source.shape.name} has stalled {num_stalls} times, and in {took_s:g} s pulls end"
                raise Violation(Check.REASON, f"{text}: {[pull.why for pull in pulls]}")
            if refused:
                self._wait(lambda: False, max(refused) + 1.0)
                break
            num_stalls += doubt_s > STALL_COUNTS_S
        world.tell("aftermath", f"{source.shape.name} is read again")
        transfer = self._publish(source)
        sink.pull(transfer, HARD_PULL_S)
        if not self._wait(lambda: self._is_delivered(transfer, sink), HARD_PULL_S):
            raise Violation(Check.WORKS_AGAIN, f"{source.shape.name} is not read again")

    def _pull_hanging(self, source: Engine, sink: Engine) -> tuple[list[Pull], float, float]:
        """Have an engine pull while no read goes on.

        Return the pulls, after what time all had ended, and for how long some were in doubt then.
        """
        world, transfer = self._world, self._publish(source)
        transfer.is_pulled_once = transfer.reads_hang = True
        self._wait(lambda: transfer.ref is not None, PULL_S)
        world.tell("aftermath", f"reads of {transfer.transfer_id} of {source.shape.name} hang")
        world.fabric.stall(world.kernel.now + PULL_S)
        sink.pull(transfer, STALLED_DEADLINE_S)
        if not self._wait(lambda: len(transfer.pulls) == sink.num_ranks, PULL_S, 0.01):
            raise Violation(Check.WORKS_AGAIN, f"{sink.shape.name} does not pull")
        pulls, began = [*transfer.pulls], max(pull.began for pull in transfer.pulls)
        world.fabric.stall(began + STALL_S)
        self._wait(lambda: all(pull.ended for pull in pulls), PULL_S, 0.01)
        took_s = world.kernel.now - began
        self._wait(lambda: not any(worker.pulls for worker in sink.ranks), HARD_PULL_S, 0.01)
        doubt_s = world.kernel.now - began - took_s
        self._wait(lambda: world.kernel.now > began + STALL_S or "did not end" in pulls[0].why, STALL_S)
        if not transfer.is_over:  # its blocks are the next one's
            transfer.publisher.do(lambda: transfer.publisher.unpublish(transfer))
        self._wait(lambda: transfer.transfer_id not in source.transfers, PULL_S)
        return pulls, took_s, doubt_s

    def _publish(self, source: Engine, grows: bool = False) -> Transfer:
        grows = grows or self._rng.random() < GROWS_SHARE
        drawn = (source.publish(1, grows) for _ in range(MAX_DRAWS))
        transfer = next((one for one in drawn if one is not None), None)
        if transfer is None:
            raise Violation(Check.WORKS_AGAIN, f"{source.shape.name} cannot publish at rest")
        transfer.lease_s = LEASE_S
        return transfer

    def _make_hard(self, transfer: Transfer, sink: Engine, hardship: Hardship) -> None:
        world, rng, source = self._world, self._rng, transfer.publisher.engine
        match hardship:
            case Hardship.SOURCE_RESTARTS:
                self._wait(lambda: False, 0.05)  # its publish has arrived
                world.after(rng.choice((0.0, WAITED_S)), self._restart, source.shape.nodes[0], LONG_AWAY_S)
            case Hardship.SINK_RESTARTS:
                self._restart(sink.shape.nodes[0])
            case Hardship.MOVERS_DIE:
                for mover in world.movers_of(source.shape.nodes[0]):
                    world.kernel.kill(mover)
            case Hardship.READERS_MOVER_DIES:
                world.planned_at[Moment.READ].append((rng.choice((0.0, 0.00005, 0.0002)), self._kill_mover))
            case Hardship.MESSAGES:
                world.planned_messages += [PlannedMessage(None) for _ in range(rng.choice((1, 2, 5)))]
            case Hardship.LONG_PREFILL | Hardship.LONGER_PREFILL:
                for worker in source.ranks:
                    world.kernel.stop(worker.process)
                    world.expectations.disturb(STOPPED_S[hardship], worker)
                    world.after(STOPPED_S[hardship], world.kernel.resume, worker.process)
            case Hardship.REQUEST_IS_CUT_OFF:
                cut = partial(self._disconnect, source.shape.nodes[0], CUT_OFF_S)
                world.planned_messages.append(PlannedMessage(0.0, cut, name="GrantRequest"))
            case Hardship.END_IS_CUT_OFF:
                cut = partial(self._disconnect, source.shape.nodes[0], LONG_CUT_OFF_S)
                last = PlannedMessage(
                    None, cut, None, f"Acknowledge {transfer.transfer_id}", source.shape.name
                )
                others = [replace(last, delay_s=0.0, strike=lambda: None)] * (sink.num_ranks - 1)
                world.planned_messages += [*others, last]
            case Hardship.LONG_READ:
                world.planned_at[Moment.READ].append((0.0, self._stall))
            case Hardship.READ_FAILS if len(transfer.steps) > 1:
                world.planned_at[Moment.READ].append((0.0, self._fail_behind_grant))
            case Hardship.READ_FAILS:
                world.planned_at[Moment.READ].append((0.0, lambda mover: mover.fail_one_read(settled=True)))
            case Hardship.READER_SLEEPS:
                world.unsure_counts |= {*sink.shape.nodes}  # a daemon hears of no bytes then
                world.planned_at[Moment.READ_DONE].append((0.0, self._cut_off_daemon))
                transfer.at_delivery = Worker.suspend
                if len({*sink.shape.nodes}) == 1 and rng.random() < 0.5:
                    transfer.at_delivery = lambda worker: worker.do(worker.leave)
            case Hardship.CONNECTION_BREAKS:
                ways = self._break_connection, SimTransport.fail_one_read  # each may leave blocks in doubt
                world.planned_at[Moment.READ].append((0.0, rng.choice(ways)))
            case Hardship.OTHER_HANGS:
                if others := [other for other in world.sources if other is not source]:
                    self._hang(rng.choice(others), sink)  # more would leave no blocks

    def _hang(self, other: Engine, sink: Engine) -> None:
        """Have an engine pull from a source whose reads hang, as far as it has blocks for them."""
        if LITTLE_ROOM & {*self._world.traits.small_numbers}:
            return

        def silence(rank: Worker) -> None:
            assert rank.store is not None
            for mover in self._world.holders_of(rank.store):
                mover.is_silent = True

        for rank in other.ranks:
            rank.do(partial(silence, rank))
        for _ in range(HANGING_PULLS):
            if (transfer := other.publish(1, grows=False, num_tokens=1)) is not None:
                transfer.reads_hang = True
                sink.pull(transfer, HARD_PULL_S)
        self._wait(lambda: False, self._rng.choice((0.0, 0.1, 0.5)))

    def _have_wait(self, sink: Engine, transfer: Transfer, dies: bool) -> None:
        """Have an engine announce a transfer and not come for it; it dies where another is to read."""
        world, transfer.lease_s = self._world, QUEUED_LEASE_S
        others = [engine for engine in world.sinks if engine is not sink and engine.is_ready]
        reader = self._rng.choice(others) if dies and others else sink
        self._wait(lambda: transfer.ref is not None, PULL_S)
        for worker in reader.ranks:
            worker.do(partial(worker.prepare, transfer))
        self._wait(lambda: False, QUEUE_S)
        if reader is not sink:
            reader.die()
            world.after(0.3, reader.start)

    def _cut_off_daemon(self, transport: SimTransport) -> None:
        """Have a mover's next word for its daemon break off: only its worker hears what it has read."""
        if transport.process.parent is not self._world.kernel.host:
            transport.process.at_cut = lambda: None

    def _kill_mover(self, transport: SimTransport) -> None:
        if transport.process.parent is not self._world.kernel.host:  # else it is a thread of a rank
            self._world.kernel.kill(transport.process)

    def _fail_behind_grant(self, transport: SimTransport) -> None:
        """Have reads fail when the grant of more is on its way: it comes when another was asked for."""

        def fail() -> None:
            transport.stalls_until = 0.0
            while transport.fail_one_read(settled=True):
                pass

        transport.stalls_until = self._world.kernel.now + 1.0
        self._world.planned_messages.append(PlannedMessage(0.05, fail, name="GrantReply"))

    def _break_connection(self, transport: SimTransport) -> None:
        """Break one of those by which a mover reads."""
        if agents := transport.agents_read_from:
            transport.lose_connection(self._rng.choice(agents))

    def _stall(self, transport: SimTransport) -> None:
        transport.stalls_until = self._world.kernel.now + LONG_READ_S

    def _restart(self, node: str, longer_s: float = AWAY_S[-1]) -> None:
        away_s = self._rng.choice((*AWAY_S, longer_s))
        self._world.kill_daemon(node)
        self._world.expectations.disturb(away_s, node)
        self._world.after(away_s, self._world.start_daemon, node)

    def check_lost_node(self) -> None:
        """A node is gone without a word while it is read, and waited for; it is given up, and comes back."""
        world, rng = self._world, self._rng
        lost = rng.choice(sorted({source.shape.nodes[0] for source in world.sources}))
        how = rng.choice([*Loss])
        world.tell("aftermath", f"{lost} {how.value}")
        of_lost = [engine for engine in world.engines if lost in engine.shape.nodes]
        readers = [sink for sink in world.sinks if sink not in of_lost]
        for source in world.sources:
            if source not in of_lost or not readers:
                continue
            if (transfer := source.publish(2)) is not None:
                rng.choice(readers).pull(transfer, LONG_PULL_S)
            for worker in source.ranks:  # what they have written is heard of too late
                if worker is not source.publisher:
                    world.kernel.stop(worker.process)
        world.kernel.sleep(rng.choice((0.0005, 0.003, 0.05, 3.0)))
        # A staged read that is posted waits for its source's mover.
        limit_s = SILENT_S + (CHUNK_REPLY_TIMEOUT_S if world.traits.placement == "staged" else 0.0)
        world.expectations.disturb(limit_s + GONE_S, *world.node_names)
        if how is Loss.STANDS_STILL:
            for process in world.processes_of(lost):
                world.kernel.stop(process)
        else:
            self._cut_off(lost, GONE_S)
        if how is Loss.IS_GONE:
            self._end(lost, of_lost)
        heard = Overheard(world, world.endpoint_of(lost), world.kernel.now + SILENT_S)
        # Some are tried again, and given up again. A read of a mover that stands still has its deadline: that
        # of the node, or of a worker that was stopped.
        granted = {} if how is Loss.IS_GONE else world.words.granted
        pulls = list(world.open_pulls)

        def waiting() -> list[Pull]:  # a home on another node may grant meanwhile
            return [pull for pull in pulls if not pull.ended and pull.transfer.name not in granted]

        if not self._wait(lambda: not waiting(), limit_s):
            who = [f"{pull.worker.name} of {pull.transfer.transfer_id}" for pull in waiting()]
            raise Violation(Check.SILENT, f"{lost} {how.value}, and its readers wait on: {who}")
        self._cut_off(lost, GONE_S)
        self._end(lost, of_lost)
        self._wait(lambda: False, GONE_S + 1.0)
        self._is_full = self._may_be_full
        heard.end()
        if needless := heard.asked_twice():
            raise Violation(Check.QUIET, f"{lost} is silent: {needless}")
        world.start_daemon(lost)
        for engine in of_lost:
            if not engine.is_up:
                engine.start()
        if not self._wait(lambda: world.is_ready, BACK_S):
            raise Violation(Check.REGISTERED, f"{lost} is back, and an engine is not registered")

    def _cut_off(self, lost: str, seconds: float) -> None:
        world = self._world
        for other in world.node_names:
            if other != lost:
                world.network.sever(world.host_of(lost), world.host_of(other), seconds)

    def _disconnect(self, node: str, seconds: float) -> None:
        """Cut a node off; its connections break at once, with what is on its way."""
        self._cut_off(node, seconds)
        self._world.expectations.disturb(seconds, *self._world.node_names)
        network, now = self._world.network, self._world.kernel.now
        for wire in [wire for wire in network.wires if network.severed_until(wire) > now]:
            network.cut(wire)

    def _end(self, lost: str, engines: list[Engine]) -> None:
        for engine in engines:
            if engine.is_up:
                engine.die()
        for process in self._world.processes_of(lost):
            self._world.kernel.kill(process)
