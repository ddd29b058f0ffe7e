"""What the daemon was asked to make of a session, and who may use the session's memory."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, auto

import msgspec

from kvxferd.client.exports import Exports
from kvxferd.client.membership import Member, RankMember
from kvxferd.client.movers import Launch, ResidentMover
from kvxferd.client.outbox import Outgoing
from kvxferd.errors import Code, EngineError, ProtocolError
from kvxferd.ids import BootId
from kvxferd.wire import worker
from kvxferd.wire.codec import encode
from kvxferd.wire.common import Descriptors, Refusal
from kvxferd.wire.limits import MAX_FDS_PER_FRAME, MAX_REGISTER_BYTES


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
        self.expects_fence = False  # what was asked last is answered with a fence page (version 2)
        self.done_before = False  # from then on the client asks by itself after a loss
        self._request = 0
        self._done_in = 0  # the epoch in which the daemon last said yes
        self._mapped: set[int] = set()  # epochs whose movers may still map the memory
        self._unproven = False  # memory was offered, and no mover's pidfd came back
        self.boot = BootId("")  # of the daemon at the other end
        self.version = 1  # of the protocol that it speaks
        self._launch: Launch | None = None
        self._owed: tuple[int, ...] = ()  # descriptors that the daemon has not asked for yet
        self._own: list[ResidentMover] = []  # those that are not quiet yet
        self._unwatched: list[ResidentMover] = []

    def begin(self, member: Member, launch: Launch | None = None) -> None:
        """Take what the session is to be; `launch` starts resident movers.

        Raises EngineError: out-of-place if it is something already, region-invalid for memory that
        needs a resident mover where nothing can start one.
        """
        if self.member is not None:
            raise EngineError(
                f"cannot register {member}: this connection is {self.member}; connect once for each",
                Code.OUT_OF_PLACE,
            )
        self._launch = launch
        if isinstance(member, RankMember) and member.exports is not None:
            self._check_reachable(member.exports)
            _check_sendable(member, member.exports)
        self.member, self.refusal, self.awaited = member, None, True

    def _check_reachable(self, exports: Exports) -> None:
        if exports.placement == "resident" and self._launch is None:
            raise EngineError(
                "cannot register memory that no other process can map: register it through kvxferd.resident",
                Code.REGION_INVALID,
            )

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

    def ask(self, notices: int) -> Outgoing:
        """Return `Register` or `Attach`. Only when `wanted`. `notices`: the descriptor of their far end."""
        self._request += 1
        self.expects_fence = True
        member = self.member
        if not isinstance(member, RankMember):
            assert member is not None
            return Outgoing(
                worker.Attach(request=self._request, engine_id=member.engine_id, generation=member.generation)
            )
        assert member.exports is not None, "memory that is held is exported"
        register = _register(self._request, member, member.exports)
        offered = self._offered(member.exports)
        if self.version < worker.FIRST_WITH_LATE_DESCRIPTORS:
            return Outgoing(register, offered)
        num_regions = len(member.exports.fds)
        regions, mover = offered[:num_regions], offered[num_regions:]
        most = MAX_FDS_PER_FRAME - len(mover) - 1
        self._owed, announced = regions[most:], num_regions if num_regions > most else 0
        register = msgspec.structs.replace(register, num_descriptors=announced, notices=True)
        return Outgoing(register, (*regions[:most], *mover, notices))

    def owed(self, request: int) -> list[Outgoing]:
        """Return the descriptors that a registration announced and did not carry."""
        self._check(request)
        owed, self._owed = self._owed, ()
        if not owed:
            return []
        assert isinstance(self.member, RankMember)
        assert self.member.exports is not None
        before = len(self.member.exports.fds) - len(owed)
        starts = range(0, len(owed), MAX_FDS_PER_FRAME)
        return [
            Outgoing(Descriptors(first=before + start), owed[start : start + MAX_FDS_PER_FRAME])
            for start in starts
        ]

    def _offered(self, exports: Exports) -> tuple[int, ...]:
        """Return what goes along with the memory's description."""
        if exports.placement != "resident":
            # From then on no mover gets the memory before its pidfd is watched here.
            self._unproven = self.version < worker.FIRST_WITH_OFFERS
            return exports.fds
        return (*exports.fds, self._start_mover(exports))

    def _start_mover(self, exports: Exports) -> int:
        assert self._launch is not None
        mover = self._launch(self.boot, exports.regions)
        self._own = [own for own in self._own if not own.is_quiet]
        self._own.append(mover)
        self._unwatched.append(mover)
        return mover.daemon_end

    def accepted(self, request: int, epoch: int) -> None:
        """The daemon said yes."""
        self._check(request)
        self.handed_over()
        self.done_before, self.awaited, self._done_in = True, False, epoch
        if isinstance(self.member, RankMember):
            self._unproven = False
            self._mapped.add(epoch)

    def acknowledged(self, epoch: int) -> None:
        """A mover of this connection may have the memory, and is watched."""
        self._mapped.add(epoch)

    def refused(self, message: worker.Refused, epoch: int) -> bool:
        """The daemon said no: nothing is mapped. Returns whether a caller waits to hear it.

        If one does, the member that never was is forgotten, or the memory stays out.
        """
        self._check(message.request)
        self._unproven = False
        self._mapped.discard(epoch)
        self.end_movers()
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

    @property
    def is_offered_movers(self) -> bool:
        """Whether the daemon offers movers of its own, and waits until they are watched."""
        return self.version >= worker.FIRST_WITH_OFFERS and self.is_rank and not self.is_resident

    @property
    def is_resident(self) -> bool:
        """Whether the rank's mover is a thread of this process."""
        member = self.member
        return (
            isinstance(member, RankMember)
            and member.exports is not None
            and (member.exports.placement == "resident")
        )

    # --- movers of this process

    def bring_mover(self) -> Outgoing | None:
        """Return `NewMover`, for a daemon that wants one; None where the memory is not to be used."""
        if not self.is_resident or self.tenancy is not Tenancy.HELD:
            return None
        assert isinstance(self.member, RankMember)
        assert self.member.exports is not None
        return Outgoing(worker.NewMover(), (self._start_mover(self.member.exports),))

    def take_unwatched(self) -> list[ResidentMover]:
        """Return the movers started since the last call."""
        unwatched, self._unwatched = self._unwatched, []
        return unwatched

    def handed_over(self) -> None:
        """The daemon has all that was sent, and nothing waits to be."""
        for mover in self._own:
            mover.handed_over()

    def stop_movers(self) -> list[ResidentMover]:
        """Have the movers of this process end; return those that have not yet."""
        for mover in self._own:
            mover.stop()
        return [mover for mover in self._own if not mover.is_quiet]

    def end_movers(self) -> None:
        """Have the movers of this process end, when nothing waits to be sent any more."""
        self.handed_over()
        self.stop_movers()

    # --- memory

    def leave(self) -> None:
        """The engine wants its memory back."""
        self.tenancy = Tenancy.LEAVING

    @property
    def proven_gone(self) -> bool:
        """Whether no process but this one can map the memory."""
        return not self._mapped and not self._unproven and self.own_quiet

    @property
    def own_quiet(self) -> bool:
        """Whether no mover of this process is left."""
        return all(mover.is_quiet for mover in self._own)

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
        self._check_reachable(exports)
        _check_sendable(self.member, exports)
        self.member = replace(self.member, exports=exports)
        self.tenancy, self.refusal, self.awaited = Tenancy.HELD, None, True

    def ask_to_resume(self) -> Outgoing:
        """Return `Resume`, for a daemon that knows the rank already."""
        assert isinstance(self.member, RankMember)
        assert self.member.exports is not None
        self._request += 1
        self.expects_fence = False  # the session has its page
        exports = self.member.exports
        resume = worker.Resume(
            request=self._request,
            regions=exports.regions,
            incarnation=exports.incarnation,
            placement=exports.placement,
        )
        return Outgoing(resume, self._offered(exports))

    def close(self) -> None:
        """Keep no memory alive."""
        self.end_movers()
        self._let_go()

    def _let_go(self) -> None:
        if isinstance(self.member, RankMember) and self.member.exports is not None:
            exports, self.member = self.member.exports, replace(self.member, exports=None)
            self._owed = ()
            exports.close()

    def _check(self, request: int) -> None:
        if request != self._request:
            raise ProtocolError(
                f"the daemon answered request {request} where {self._request} was asked", Code.OUT_OF_PLACE
            )


def _register(request: int, member: RankMember, exports: Exports) -> worker.Register:
    return worker.Register(
        request=request,
        engine=member.engine,
        layout=member.layout,
        regions=exports.regions,
        incarnation=exports.incarnation,
        placement=exports.placement,
    )


def _check_sendable(member: RankMember, exports: Exports) -> None:
    """Raise EngineError(region-invalid) for what no frame carries: here, in the caller's thread."""
    try:
        num_bytes = len(encode(_register(0, member, exports)))
    except (TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"cannot register {member}: its regions: {error}", Code.REGION_INVALID) from error
    if num_bytes > MAX_REGISTER_BYTES:
        raise EngineError(
            f"cannot register {member}: its layout and regions take {num_bytes} bytes, "
            f"{MAX_REGISTER_BYTES} go; describe fewer tensors or regions",
            Code.REGION_INVALID,
        )
