"""What the daemon was asked to make of a session, and who may use the session's memory."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, auto

from kvxferd.client.exports import Exports
from kvxferd.client.membership import Member, RankMember
from kvxferd.client.outbox import Outgoing
from kvxferd.errors import Code, EngineError, ProtocolError
from kvxferd.wire import worker
from kvxferd.wire.common import Refusal


class Tenancy(Enum):
    """Whether the daemon may use the rank's memory."""

    HELD = auto()
    LEAVING = auto()  # suspend was asked
    GONE = auto()  # Suspended was told: the engine may have freed it


class Enrolment:
    """Asks, again after each loss, to be what the engine said it is."""

    def __init__(self) -> None:
        self.member: Member | None = None
        self.tenancy = Tenancy.HELD
        self.refusal: Refusal | None = None  # the answer to the caller that waits
        self.awaited = False  # a caller waits for the answer
        self.done_before = False  # from then on the client asks by itself after a loss
        self._request = 0
        self._done_in = 0  # the epoch in which the daemon last said yes
        self._mapped: set[int] = set()  # epochs whose movers may still map the memory
        self._unproven = False  # memory was offered, and no mover's pidfd came back

    def begin(self, member: Member) -> None:
        """Take what the session is to be. Raises EngineError(out-of-place) if it is something already."""
        if self.member is not None:
            raise EngineError(
                f"cannot register {member}: this connection is {self.member}; connect once for each",
                Code.OUT_OF_PLACE,
            )
        self.member, self.refusal, self.awaited = member, None, True

    def abandon(self) -> None:
        """The first answer did not come in time."""
        self._let_go()
        self.member, self._unproven = None, False

    @property
    def wanted(self) -> bool:
        """Whether to ask a daemon that has just welcomed the session.

        Memory that was offered without an answer may be mapped by a mover that nobody here can
        watch: only a daemon's `Suspended` proves that it is not, so it is asked once more.
        """
        if self.member is None:
            return False
        return self.tenancy is Tenancy.HELD or (self.tenancy is Tenancy.LEAVING and self._unproven)

    def ask(self) -> Outgoing:
        """Return `Register` or `Attach`. Only when `wanted`."""
        self._request += 1
        member = self.member
        if not isinstance(member, RankMember):
            assert member is not None
            return Outgoing(
                worker.Attach(request=self._request, engine_id=member.engine_id, generation=member.generation)
            )
        assert member.exports is not None, "memory that is held is exported"
        self._unproven = True
        register = worker.Register(
            request=self._request,
            engine=member.engine,
            layout=member.layout,
            regions=member.exports.regions,
            incarnation=member.exports.incarnation,
            placement=member.exports.placement,
        )
        return Outgoing(register, member.exports.fds)

    def accepted(self, request: int, epoch: int) -> None:
        """The daemon said yes."""
        self._check(request)
        self.done_before, self.awaited, self._done_in = True, False, epoch
        if isinstance(self.member, RankMember):
            self._unproven = False
            self._mapped.add(epoch)

    def refused(self, message: worker.Refused) -> bool:
        """The daemon said no: nothing is mapped. Returns whether a caller waits to hear it.

        If one does, the member that never was is forgotten, or the memory stays out.
        """
        self._check(message.request)
        self._unproven = False
        if not self.awaited:
            return False
        self.refusal = Refusal(message.code, message.message, message.retry_after_s)
        self.awaited = False
        if self.done_before:
            self.left()
        else:
            self._let_go()
            self.member = None
        return True

    def is_done(self, epoch: int) -> bool:
        """Whether the daemon of this connection has said yes."""
        return self._done_in == epoch

    @property
    def is_rank(self) -> bool:
        """Whether the session has memory, and so a mover."""
        return isinstance(self.member, RankMember)

    # --- memory

    def leave(self) -> None:
        """The engine wants its memory back."""
        self.tenancy = Tenancy.LEAVING

    @property
    def proven_gone(self) -> bool:
        """Whether no process but this one can map the memory."""
        return not self._mapped and not self._unproven

    def quiet(self, epoch: int) -> None:
        """The movers of that connection are dead, or have let go."""
        self._mapped.discard(epoch)

    def left(self) -> None:
        """It is told that the memory may go: keep nothing of it alive."""
        self.tenancy = Tenancy.GONE
        self._let_go()

    def come_back(self, exports: Exports) -> None:
        """The memory is here again, in a new mapping."""
        assert isinstance(self.member, RankMember)
        self.member = replace(self.member, exports=exports)
        self.tenancy, self.refusal, self.awaited = Tenancy.HELD, None, True

    def ask_to_resume(self) -> Outgoing:
        """Return `Resume`, for a daemon that knows the rank already."""
        assert isinstance(self.member, RankMember)
        assert self.member.exports is not None
        self._request += 1
        self._unproven = True
        exports = self.member.exports
        resume = worker.Resume(
            request=self._request,
            regions=exports.regions,
            incarnation=exports.incarnation,
            placement=exports.placement,
        )
        return Outgoing(resume, exports.fds)

    def close(self) -> None:
        """Keep no memory alive."""
        self._let_go()

    def _let_go(self) -> None:
        if isinstance(self.member, RankMember) and self.member.exports is not None:
            exports, self.member = self.member.exports, replace(self.member, exports=None)
            exports.close()

    def _check(self, request: int) -> None:
        if request != self._request:
            raise ProtocolError(
                f"the daemon answered request {request} where {self._request} was asked", Code.OUT_OF_PLACE
            )
