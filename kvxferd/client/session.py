"""One session as data: what its engine asked, what its daemon said, what to send next.

No socket and no thread: `Connection` feeds it and sends what `next_outgoing` gives. The caller
holds the session's lock around every call; time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from kvxferd.client.blocks import Packed
from kvxferd.client.enrolment import Enrolment, Tenancy
from kvxferd.client.events import Disconnected, Emit, PullTicket, Suspended
from kvxferd.client.exports import Exports
from kvxferd.client.fence import FenceSlots, Page
from kvxferd.client.incarnations import KnownIncarnations
from kvxferd.client.membership import Member, RankMember
from kvxferd.client.movers import Launch
from kvxferd.client.ordering import Completion, Held
from kvxferd.client.outbox import Item, Outbox, Outgoing, SendPublish, SendPull
from kvxferd.client.publishes import Publish, Publishes
from kvxferd.client.pulls import Pulls
from kvxferd.client.refs import TransferRef
from kvxferd.client.standing import PASSING_ON_REJOIN, Standing
from kvxferd.errors import Code, EngineError, KvxferdError, ProtocolError
from kvxferd.ids import BootId, Endpoint, Incarnation, Ticket, TransferId
from kvxferd.wire import common, worker
from kvxferd.wire.common import Message, Refusal

CancelPull = Callable[[Ticket], None]

GREETING_S = 10.0  # a daemon answers Hello at once; one that does not is stuck
REJOIN_S = 30.0  # a registration may wait for a mover to be made, and for an old one to die


class Session:
    """Everything a client knows. Its methods return at once."""

    def __init__(self, name: str, fence: FenceSlots, fds: tuple[int, ...], emit: Emit) -> None:
        self.standing = Standing.APART
        self.final: Refusal | None = None  # why the session is over
        self.epoch = 0  # counts connections
        self.version = 1  # of the worker protocol, as the present daemon chose
        self.enrolment = Enrolment()
        self._pulls = Pulls(emit)
        self._fence = fence
        self._publishes = Publishes(fence, emit)
        self._known = KnownIncarnations()
        self._outbox = Outbox(self._pulls, self._publishes)
        self._held = Held()
        self._emit = emit
        self._name = name
        self._hello_fds = fds  # of the fence page, and of the notices
        self._notices_fd = fds[-1]
        self._lease_s = 0.0
        self._endpoint = Endpoint("")
        self._patience: float | None = None  # when the daemon must have answered

    # --- the connection's life

    def connected(self, now: float) -> None:
        """A socket to a daemon is there: greet it."""
        self.epoch += 1
        self.standing = Standing.GREETING
        self._patience = now + GREETING_S
        hello = worker.Hello(versions=worker.WORKER_VERSIONS, client=self._name, notices=True)
        self._outbox.say(hello, self._hello_fds)

    def lose(self, now: float, code: Code, why: str) -> None:
        """The connection has ended. What it carried is judged; what can wait waits for the next."""
        if self.standing is not Standing.OVER:
            self.standing = Standing.APART
        self._patience = None
        self._outbox.lose()
        self._pulls.lose(self.epoch, now, code, why)
        self._publishes.lose()
        self.enrolment.end_movers()
        if self.enrolment.tenancy is Tenancy.LEAVING:
            self._publishes.release_all(Code.SUSPENDED)

    def quiet(self, epoch: int) -> None:
        """Every mover of an ended connection is dead."""
        self._pulls.quiet(epoch)
        self.enrolment.quiet(epoch)
        self._leave_if_proven()

    def end(self, code: Code, message: str) -> None:
        """No daemon will take this session any more. After `lose`."""
        if self.standing is Standing.OVER:
            return
        self.standing = Standing.OVER
        self.final = Refusal(code, message)
        self._pulls.drop_queued(code, message)
        self._publishes.release_all(Code.PUBLISHER_GONE)
        self._outbox.clear()
        self._emit(Disconnected(code, message))

    def settle(self, now: float, code: Code, why: str) -> None:
        """Every mover of the present connection was this process's, and is gone: pulls end safely."""
        self._pulls.lose(self.epoch, now, code, why)
        self.quiet(self.epoch)

    def close(self, code: Code, why: str) -> None:
        """The engine closes it, or the client is broken: end everything, fence words first."""
        self._publishes.release_all(Code.PUBLISHER_GONE)
        self._pulls.close(code, why)
        self._held.clear()
        self._outbox.clear()
        if self.enrolment.is_resident:
            self.enrolment.quiet(self.epoch)  # from here on its mover's own word counts alone
        self.enrolment.close()
        self.standing = Standing.OVER
        if self.final is None:
            self.final = Refusal(code, why)
            if code is Code.INTERNAL:
                self._emit(Disconnected(code, why))

    def tick(self, now: float) -> None:
        """Do what is due. Raises KvxferdError when the daemon has kept the session waiting too long."""
        self._leave_if_proven()
        self._held.look(now)
        for ticket in self._pulls.expire(now):
            if self.standing is Standing.READY:
                self._outbox.queue(worker.Cancel(ticket=ticket))
        for transfer_id in self._publishes.take_again(now):
            self._outbox.queue(SendPublish(transfer_id))
        if self.standing is not Standing.READY:
            self._publishes.expire(now)
        if self._patience is not None and now >= self._patience:
            raise KvxferdError("the daemon did not answer in time", Code.DAEMON_LOST)

    def next_deadline(self) -> float | None:
        """When `tick` wants to be called."""
        times = [self._pulls.next_deadline(), self._publishes.next_again(), self._patience]
        times.append(self._held.next_look())
        if self.standing is not Standing.READY:
            times.append(self._publishes.next_deadline())
        return min((t for t in times if t is not None), default=None)

    def has_little_to_say(self, most_bytes: int) -> bool:
        """Whether what waits for a daemon that is ready is one request, with few block ids."""
        return self.standing is Standing.READY and self._outbox.is_short(most_bytes)

    def next_outgoing(self, now: float) -> Outgoing | None:
        """Return the next message to send, None when there is none now."""
        return self._outbox.next(self.standing is Standing.READY, self.epoch, self.version, now)

    # --- being a rank or a publisher

    def join(self, member: Member, launch: Launch | None = None) -> None:
        """Ask to be a rank or a publisher. Raises EngineError as `Enrolment.begin` does."""
        self._check_alive()
        self.enrolment.begin(member, launch)
        self._known = KnownIncarnations()
        if isinstance(member, RankMember) and member.exports is not None:
            self._known.map_own(member.engine.rank, member.exports.incarnation)
        self._ask_if_wanted(None)

    def suspend(self) -> None:
        """Ask for the memory back; `Suspended` is told once no mover maps it."""
        self._check_alive()
        if self.enrolment.tenancy is not Tenancy.HELD:
            return
        self.enrolment.leave()
        self._pulls.drop_queued(Code.SUSPENDED, "the rank is suspended")
        if self.standing is Standing.READY:
            if (words := self.last_words()) is not None:
                self._outbox.queue(words)
            self._outbox.queue(worker.Suspend())
        elif self.standing is not Standing.JOINING:
            self._publishes.release_all(Code.SUSPENDED)
            self._leave_if_proven()

    def resume(self, exports: Exports) -> None:
        """Offer the memory again. Raises EngineError(out-of-place) before `Suspended`."""
        self._check_alive()
        if self.enrolment.tenancy is not Tenancy.GONE:
            raise EngineError("cannot resume a rank before its Suspended", Code.OUT_OF_PLACE)
        self.enrolment.come_back(exports)
        assert isinstance(self.enrolment.member, RankMember)
        self._known.map_own(self.enrolment.member.engine.rank, exports.incarnation)
        if self.standing is Standing.READY:
            self.standing = Standing.JOINING
            asked = self.enrolment.ask_to_resume()
            self._outbox.say(asked.message, asked.fds)
        else:
            self._ask_if_wanted(None)

    def _ask_if_wanted(self, patience: float | None) -> None:
        if self.standing is Standing.OPEN and self.enrolment.wanted:
            self.standing, self._patience = Standing.JOINING, patience
            asked = self.enrolment.ask(self._notices_fd)
            self._outbox.say(asked.message, asked.fds)

    def _leave_if_proven(self) -> None:
        if self.enrolment.tenancy is Tenancy.LEAVING and self.enrolment.proven_gone:
            self._publishes.release_all(Code.SUSPENDED)  # whichever way led here: its bytes go
            self.enrolment.left()
            self._emit(Suspended())

    # --- requests

    def publish(
        self,
        transfer_id: TransferId,
        blocks: Packed,
        *,
        num_tokens: int,
        num_readers: int,
        lease_s: float | None,
        now: float,
        after: Completion | None = None,
    ) -> TransferRef:
        """Take a transfer to publish, which the daemon hears of `after`. Raises EngineError, BusyError."""
        what = f"publish {transfer_id}"
        self._check_in_use(what)
        if not self._known.all and self.version > 1:
            raise EngineError(
                f"cannot {what}: no rank of {self.enrolment.member} has been registered; register its ranks "
                "first",
                Code.ENGINE_INCOMPLETE,
            )
        ends_at = now + (self._lease_s if lease_s is None else lease_s)
        known = self._known.all
        publish = self._publishes.add(transfer_id, blocks, num_tokens, num_readers, ends_at, known)
        if after is not None:
            publish.held = True
            self._held.hold(after, lambda: self._written(publish), lambda w: self._publishes.fail(publish, w))
        elif self.standing is Standing.READY:  # else it goes with the replay
            self._outbox.queue(SendPublish(transfer_id))
        member = self.enrolment.member
        assert member is not None
        return TransferRef(self._endpoint, member.engine_id, member.generation, transfer_id, publish.nonce)

    def _written(self, publish: Publish) -> None:
        """What a held publish waited for is done."""
        if self._publishes.let_go(publish) and self._is_ready_to_use:
            self._outbox.queue(SendPublish(publish.transfer_id))

    @property
    def _is_ready_to_use(self) -> bool:
        return self.standing is Standing.READY and self.enrolment.tenancy is Tenancy.HELD

    def ready(self, transfer_id: TransferId, now: float, after: Completion | None = None) -> None:
        """This rank has finished writing a transfer, or will have `after`."""
        self._check_in_use(f"say that {transfer_id} is ready")
        written = self._known.own
        if after is not None:
            # Work that fails is never ready: the publisher's lease ends the transfer.
            self._held.hold(after, lambda: self._say_ready(transfer_id, now, written), lambda why: None)
            return
        self._say_ready(transfer_id, now, written)

    def _say_ready(self, transfer_id: TransferId, now: float, written: Incarnation) -> None:
        if written != self._known.own or self.enrolment.tenancy is not Tenancy.HELD:
            return  # the rank has slept since, and the bytes are gone
        self._publishes.ready(transfer_id, now, written)
        if self.standing is Standing.READY:  # else it goes with the replay
            self._outbox.queue(self._ready_message(transfer_id, written))

    def _ready_message(self, transfer_id: TransferId, written: Incarnation) -> worker.Ready:
        incarnation = written if self.version > 1 else Incarnation("")
        return worker.Ready(transfer_id=transfer_id, incarnation=incarnation)

    def unpublish(self, transfer_id: TransferId) -> None:
        """Give a transfer up. One that is over already says nothing new."""
        self._check_alive()
        if self.standing is not Standing.READY:
            self._publishes.release_here(transfer_id, Code.UNPUBLISHED)
        elif self._publishes.withdraw(transfer_id):
            self._outbox.queue(worker.Unpublish(transfer_id=transfer_id))

    def hint(self, message: worker.Prepare | worker.Abandon) -> None:
        """Pass on what has no answer, to the next daemon if there is none now."""
        self._check_alive()
        self._outbox.check_room("tell the daemon")
        self._outbox.queue(message)

    def pull(
        self,
        ref: common.TransferRef,
        blocks: Packed,
        num_tokens: int,
        deadline: float,
        cancel: CancelPull,
        after: Completion | None = None,
    ) -> PullTicket:
        """Take a pull, which the daemon hears of `after`. Raises EngineError, BusyError."""
        self._check_in_use(f"pull {ref.transfer_id}")
        ticket = self._pulls.ask(ref, blocks, num_tokens, deadline, cancel)
        send = SendPull(ticket.number)
        if after is None:
            self._outbox.queue(send)
        else:
            fail = self._pulls.fail_held
            self._held.hold(after, lambda: self._outbox.queue(send), lambda why: fail(ticket.number, why))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a pull early."""
        if self._pulls.cancel(ticket) and self.standing is Standing.READY:
            self._outbox.queue(worker.Cancel(ticket=ticket))

    def _check_in_use(self, what: str) -> None:
        self._check_alive()
        self._outbox.check_room(what)
        if self.enrolment.tenancy is not Tenancy.HELD:
            raise EngineError(f"cannot {what}: the rank is suspended; resume it first", Code.SUSPENDED)

    def _check_alive(self) -> None:
        if self.final is not None:
            raise KvxferdError(f"the session is over: {self.final.message}", self.final.code)

    # --- what the daemon says

    def brings_fence(self, message: worker.DaemonMessage) -> bool:
        """Whether the session's new fence page comes with the message; it is offered before `feed`."""
        makes_pages = self.version >= worker.FIRST_WITH_FENCE_PAGES
        return makes_pages and isinstance(message, worker.Registered) and self.enrolment.expects_fence

    def offer_fence(self, page: Page) -> None:
        """Take the page that came with the message that is fed next."""
        self._fence.offer(page)

    def feed(self, message: worker.DaemonMessage, now: float) -> None:
        """Take a message. Raises KvxferdError when the connection must end; its code says why."""
        match message:
            case worker.Welcome():
                self._welcomed(message, now)
            case worker.Registered():
                self._registered(message, now)
            case worker.DescriptorsWanted():
                self._require(Standing.JOINING, message)
                for owed in self.enrolment.owed(message.request):
                    self._outbox.say(owed.message, owed.fds)
            case worker.EngineRanks():
                self._known.report(message.ranks)
            case worker.Refused():
                self._refused(message)
            case worker.MoverChanged():
                self.enrolment.handed_over()  # a pidfd is the connection's business
            case worker.MoverOffered():
                self._offered(message)
            case worker.MoverWanted():
                self._require(Standing.READY, message)
                if brought := self.enrolment.bring_mover():
                    self._outbox.say(brought.message, brought.fds)
            case worker.Delivered():
                self._pulls.delivered(message)
            case worker.Failed():
                self._pulls.failed(message)
            case worker.Quiesced():
                self._pulls.quiesced(message)
            case worker.PullsInterrupted():
                self._require(Standing.READY, message)
                self._outbox.queue(self._pulls.interrupted(message))
            case worker.Released():
                self._publishes.released(message.transfer_id, message.why)
            case worker.PublishRefused():
                self._publishes.refused(message, now)
            case worker.Suspended():
                self._suspended(now)
            case worker.Farewell():
                self._ended(message)

    def _ended(self, message: worker.Farewell) -> NoReturn:
        if self.standing is Standing.GREETING and message.code is Code.BAD_FRAME:
            # So answers a daemon that is too old to read on in a hello that it does not know.
            raise KvxferdError(
                f"cannot speak with the daemon: it does not understand hello ({message.message}); "
                "upgrade the older",
                Code.BAD_VERSION,
            )
        if self.enrolment.done_before and message.code in PASSING_ON_REJOIN:
            text = f"the daemon has ended the session for now: {message.message}"
            raise KvxferdError(text, Code.DAEMON_LOST)
        raise KvxferdError(message.message, message.code)

    @property
    def awaits_notices(self) -> bool:
        """Whether a mover may have something to say."""
        return len(self._pulls) > 0

    def noticed(self, delivered: worker.Delivered) -> None:
        """A mover's word. Raises KvxferdError as `feed` does."""
        self._pulls.noticed(delivered)

    def last_words(self) -> worker.Noticed | None:
        """What the daemon must know before the rank's mover ends; None where there is nothing."""
        if self.standing is not Standing.READY or not (tickets := self._pulls.take_noticed()):
            return None
        return worker.Noticed(tickets=tickets)

    def _welcomed(self, message: worker.Welcome, now: float) -> None:
        self._require(Standing.GREETING, message)
        versions = worker.WORKER_VERSIONS
        if not versions.oldest <= message.version <= versions.newest:
            raise ProtocolError(
                f"the daemon chose protocol version {message.version}, not one offered", Code.BAD_VERSION
            )
        self.standing, self._patience = Standing.OPEN, None
        self.version = self.enrolment.version = message.version
        self.enrolment.boot = BootId(message.boot_id)
        self._lease_s = message.lease_s
        self._ask_if_wanted(now + REJOIN_S if self.enrolment.done_before else None)

    def _offered(self, message: worker.MoverOffered) -> None:
        """The connection watches the mover already: it may have the memory."""
        can_be = self.standing in (Standing.JOINING, Standing.READY)
        if not can_be or self.enrolment.tenancy is Tenancy.GONE or not self.enrolment.is_offered_movers:
            raise ProtocolError("the daemon offered a mover that nobody asked for", Code.OUT_OF_PLACE)
        self.enrolment.acknowledged(self.epoch)
        self._outbox.say(worker.MoverAcknowledged(number=message.number))

    def _registered(self, message: worker.Registered, now: float) -> None:
        self._require(Standing.JOINING, message)
        self.enrolment.accepted(message.request, self.epoch)
        if self.enrolment.expects_fence:
            self._publishes.move_words()
        self.standing, self._patience = Standing.READY, None
        self._endpoint = Endpoint(message.endpoint)
        if self.enrolment.tenancy is Tenancy.LEAVING:
            self._publishes.release_all(Code.SUSPENDED)
            self._outbox.queue(worker.Suspend())
            return
        if self.version < 2 and not self._writes_alone:
            # Version 1 cannot name the other ranks' memory, and one of them may have slept meanwhile.
            self._publishes.release_all(Code.RANK_LOST)
        transfers, ready = self._publishes.replay(now, self._lease_s)
        again: list[Item] = [SendPublish(one) for one in transfers]
        self._outbox.replay([*again, *(self._ready_message(*one) for one in ready)])

    @property
    def _writes_alone(self) -> bool:
        """Whether what this session publishes is this rank's word for this rank's memory."""
        member = self.enrolment.member
        if not isinstance(member, RankMember):
            return False
        return not member.engine.publish_implies_ready or len(member.engine.ranks()) == 1

    def _refused(self, message: worker.Refused) -> None:
        self._require(Standing.JOINING, message)
        known = self.enrolment.is_done(self.epoch)
        self.standing, self._patience = Standing.READY if known else Standing.OPEN, None
        heard = self.enrolment.refused(message, self.epoch)
        self._leave_if_proven()
        if not heard and self.enrolment.tenancy is Tenancy.HELD:
            if message.code in PASSING_ON_REJOIN:
                text = f"the daemon does not take the session back: {message.message}"
                raise KvxferdError(text, Code.DAEMON_LOST)
            raise KvxferdError(message.message, message.code)

    def _suspended(self, now: float) -> None:
        if self.enrolment.tenancy is not Tenancy.LEAVING:
            raise ProtocolError("the daemon suspended a rank that did not ask for it", Code.OUT_OF_PLACE)
        self._pulls.lose(self.epoch, now, Code.SUSPENDED, "the rank was suspended")
        self._publishes.release_all(Code.SUSPENDED)
        self.enrolment.quiet(self.epoch)
        if not self.enrolment.stop_movers():
            self._pulls.quiet(self.epoch)
        self._leave_if_proven()

    def _require(self, standing: Standing, message: Message) -> None:
        if self.standing is not standing:
            raise ProtocolError(
                f"the daemon sent {type(message).__name__} while the session was {self.standing.name}",
                Code.OUT_OF_PLACE,
            )
