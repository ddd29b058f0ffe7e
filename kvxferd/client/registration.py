"""A session's role (rank or publisher), its registration, and which movers may use its memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TypeVar

import msgspec

from kvxferd.client.memory_export import MemoryExport
from kvxferd.client.mover_watch import LaunchMover, ResidentMover
from kvxferd.client.outbox import Outgoing
from kvxferd.errors import Code, EngineError, LayoutError, ProtocolError
from kvxferd.ids import BootId, EngineId, Generation
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.wire import worker
from kvxferd.wire.codec import encode
from kvxferd.wire.common import Refusal
from kvxferd.wire.fd_batches import split_fds
from kvxferd.wire.limits import MAX_FDS_PER_FRAME, MAX_REGISTER_BYTES

T = TypeVar("T")

# Memory that movers of closed sessions still use, with what keeps it allocated: freed, it would be written
# while the engine uses it for something else.
_STILL_IN_USE: list[tuple[ResidentMover, tuple[object, ...]]] = []


@dataclass(frozen=True, slots=True)
class RankRole:
    """The session is a rank; `exports` is None while its memory is suspended."""

    engine: EngineSpec
    layout: RankLayout
    exports: MemoryExport | None

    @property
    def engine_id(self) -> EngineId:
        """The rank's engine."""
        return self.engine.engine_id

    @property
    def generation(self) -> Generation:
        """The engine's generation."""
        return self.engine.generation

    def __str__(self) -> str:
        return f"rank {self.engine.rank} of {self.engine.key}"


@dataclass(frozen=True, slots=True)
class PublisherRole:
    """The session is an engine's scheduler: it publishes, and has no memory."""

    engine_id: EngineId
    generation: Generation

    def __str__(self) -> str:
        return f"publisher of {self.engine_id}@{self.generation}"


SessionRole = RankRole | PublisherRole


class MemoryState(Enum):
    """Whether the daemon may use the rank's memory."""

    SHARED = auto()
    SUSPENDING = auto()  # the engine has called suspend
    SUSPENDED = auto()  # Suspended is emitted: the engine may have freed the memory


class Registration:
    """Registers the session in its role, and again after each lost connection."""

    def __init__(self) -> None:
        self.role: SessionRole | None = None
        self.memory_state = MemoryState.SHARED
        self.reply_refusal: Refusal | None = None  # the daemon's refusal, for the caller that waits
        self.caller_waits = False  # a caller waits for the reply
        self.expects_fence_page = False  # the reply to the last request carries a fence page
        self.was_registered = False  # from then on the client registers by itself after a loss
        self._request = 0
        self._registered_epoch = 0  # the epoch in which the daemon last accepted
        self._mapped_epochs: set[int] = set()  # epochs whose movers may still map the memory
        self.boot = BootId("")  # of the daemon at the other end
        self._launch: LaunchMover | None = None
        self._unsent_fds: tuple[int, ...] = ()  # descriptors that the daemon has not requested yet
        # Those that are not quiesced yet, with the owners of the memory that each uses.
        self._resident_movers: list[tuple[ResidentMover, tuple[object, ...]]] = []
        self._unwatched_movers: list[ResidentMover] = []

    def begin(self, role: SessionRole, launch: LaunchMover | None = None) -> None:
        """Set the session's role; `launch` starts resident movers.

        Raises EngineError: out-of-place if the session has a role already, region-invalid for memory that
        needs a resident mover where `launch` is None.
        """
        if self.role is not None:
            raise EngineError(
                f"cannot register {role}: this connection is {self.role}; connect once for each",
                Code.OUT_OF_PLACE,
            )
        self._launch = launch
        if isinstance(role, RankRole) and role.exports is not None:
            self._check_reachable(role.exports)
            _check_sendable(role, role.exports)
        self.role, self.reply_refusal, self.caller_waits = role, None, True

    def _check_reachable(self, exports: MemoryExport) -> None:
        if exports.placement == "resident" and self._launch is None:
            raise EngineError(
                "cannot register memory that no other process can map: register it through kvxferd.resident",
                Code.REGION_INVALID,
            )

    def give_up(self) -> None:
        """Drop the role: the reply to the first request did not come in time."""
        self._close_exports()
        self.role = None

    @property
    def should_register(self) -> bool:
        """Whether to register with a daemon that has just welcomed the session."""
        return self.role is not None and self.memory_state is MemoryState.SHARED

    def build_request(self, delivery_fd: int) -> Outgoing:
        """Return `Register` or `Attach`. Only when `should_register`.

        `delivery_fd`: the far end of the socket for deliveries.
        """
        self._request += 1
        self.expects_fence_page = True
        role = self.role
        if not isinstance(role, RankRole):
            assert role is not None
            return Outgoing(
                worker.Attach(request=self._request, engine_id=role.engine_id, generation=role.generation)
            )
        assert role.exports is not None, "memory that is shared is exported"
        register = _register_message(self._request, role, role.exports)
        offered = self._fds_to_offer(role.exports)
        num_regions = len(role.exports.fds)
        regions, mover = offered[:num_regions], offered[num_regions:]
        max_fds = MAX_FDS_PER_FRAME - len(mover) - 1
        self._unsent_fds, announced = regions[max_fds:], num_regions if num_regions > max_fds else 0
        register = msgspec.structs.replace(register, num_descriptors=announced)
        return Outgoing(register, (*regions[:max_fds], *mover, delivery_fd))

    def build_fd_batches(self, request: int) -> list[Outgoing]:
        """Return the descriptors that a registration announced and did not carry."""
        self.check_request_number(request)
        unsent, self._unsent_fds = self._unsent_fds, ()
        if not unsent:
            return []
        assert isinstance(self.role, RankRole)
        assert self.role.exports is not None
        num_before = len(self.role.exports.fds) - len(unsent)
        return [Outgoing(batch, fds) for batch, fds in split_fds(unsent, num_before)]

    def _fds_to_offer(self, exports: MemoryExport) -> tuple[int, ...]:
        """Return the descriptors that are sent with the memory's description."""
        if exports.placement != "resident":
            return exports.fds
        return (*exports.fds, self._start_mover(exports))

    def _start_mover(self, exports: MemoryExport) -> int:
        assert self._launch is not None
        mover = self._launch(self.boot, exports.regions)
        self._drop_quiesced_movers()
        self._resident_movers.append((mover, exports.owners))
        self._unwatched_movers.append(mover)
        return mover.daemon_end

    def _drop_quiesced_movers(self) -> None:
        self._resident_movers = [own for own in self._resident_movers if not own[0].is_quiesced]

    def handle_accepted(self, message: worker.Registered, epoch: int) -> None:
        """Record that the daemon has accepted the request. Raises ProtocolError for a wrong reply."""
        self.check_request_number(message.request)
        self.close_daemon_ends()
        self.was_registered, self.caller_waits, self._registered_epoch = True, False, epoch
        if isinstance(self.role, RankRole):
            self._mapped_epochs.add(epoch)

    def mark_mapped(self, epoch: int) -> None:
        """Record that a mover of this connection, which is watched, may map the memory."""
        self._mapped_epochs.add(epoch)

    def handle_refused(self, message: worker.Refused, epoch: int) -> bool:
        """Record that the daemon has refused: nothing is mapped. Return whether a caller waits for the reply.

        If one does, a first registration drops its role, and a later one leaves the memory suspended.
        """
        self.check_request_number(message.request)
        self._mapped_epochs.discard(epoch)
        self.close_and_stop_movers()
        if not self.caller_waits:
            return False
        self.reply_refusal = Refusal(message.code, message.message, message.retry_after_s)
        self.caller_waits = False
        if self.was_registered:
            self.finish_suspend()
        else:
            self._close_exports()
            self.role = None
        return True

    def is_registered(self, epoch: int) -> bool:
        """Return whether the daemon of this connection has accepted."""
        return self._registered_epoch == epoch

    @property
    def expects_mover_offers(self) -> bool:
        """Whether the daemon offers movers of its own and waits until they are watched."""
        return isinstance(self.role, RankRole) and not self.is_resident

    @property
    def is_resident(self) -> bool:
        """Whether the rank's mover is a thread of this process."""
        role = self.role
        return (
            isinstance(role, RankRole) and role.exports is not None and (role.exports.placement == "resident")
        )

    @property
    def launches_movers(self) -> bool:
        """Whether the rank was registered with movers of this process, suspended or not."""
        return self._launch is not None

    # --- movers of this process

    def build_new_mover(self) -> Outgoing | None:
        """Return `NewMover`, the reply to `MoverRequest`; None where the memory must not be used."""
        if not self.is_resident or self.memory_state is not MemoryState.SHARED:
            return None
        assert isinstance(self.role, RankRole)
        assert self.role.exports is not None
        return Outgoing(worker.NewMover(), (self._start_mover(self.role.exports),))

    def pop_unwatched_movers(self) -> list[ResidentMover]:
        """Return the movers started since the last call."""
        unwatched, self._unwatched_movers = self._unwatched_movers, []
        return unwatched

    def close_daemon_ends(self) -> None:
        """Close the daemon's ends of the movers' sockets: the daemon has its copies, and none waits."""
        for mover, _ in self._resident_movers:
            mover.close_daemon_end()

    def stop_movers(self) -> list[ResidentMover]:
        """Request the end of this process's movers; return those that have not ended yet."""
        for mover, _ in self._resident_movers:
            mover.stop()
        return [mover for mover, _ in self._resident_movers if not mover.is_quiesced]

    def close_and_stop_movers(self) -> None:
        """Request the end of this process's movers, when nothing waits to be sent any more."""
        self.close_daemon_ends()
        self.stop_movers()

    # --- memory

    def begin_suspend(self) -> None:
        """Record that the engine has called suspend."""
        self.memory_state = MemoryState.SUSPENDING

    @property
    def is_unmapped_elsewhere(self) -> bool:
        """Whether no process but this one can map the memory."""
        return not self._mapped_epochs and self.resident_movers_quiesced

    @property
    def resident_movers_quiesced(self) -> bool:
        """Whether no mover of this process is left."""
        return all(mover.is_quiesced for mover, _ in self._resident_movers)

    def mark_unmapped(self, epoch: int) -> None:
        """Record that the movers of that connection are dead or have unmapped the memory."""
        self._mapped_epochs.discard(epoch)

    def finish_suspend(self) -> None:
        """Close the exports: the engine may free its memory from here on."""
        self.memory_state = MemoryState.SUSPENDED
        self._drop_quiesced_movers()
        self._close_exports()

    def begin_resume(self, exports: MemoryExport) -> None:
        """Set the memory's new mapping. Raises EngineError as `begin` does."""
        assert isinstance(self.role, RankRole)
        self._check_reachable(exports)
        _check_sendable(self.role, exports)
        self.role = replace(self.role, exports=exports)
        self.memory_state, self.reply_refusal, self.caller_waits = MemoryState.SHARED, None, True

    def build_resume(self) -> Outgoing:
        """Return `Resume`, for a daemon with which the rank is registered."""
        assert isinstance(self.role, RankRole)
        assert self.role.exports is not None
        self._request += 1
        self.expects_fence_page = False  # the session has its page
        exports = self.role.exports
        resume = worker.Resume(
            request=self._request,
            regions=exports.regions,
            incarnation=exports.incarnation,
            placement=exports.placement,
        )
        return Outgoing(resume, self._fds_to_offer(exports))

    def close(self) -> None:
        """End the movers, and keep no memory alive but what a mover of this process still uses."""
        self.close_and_stop_movers()
        in_use = [*_STILL_IN_USE, *self._resident_movers]
        self._resident_movers = [(mover, ()) for mover, _ in self._resident_movers]
        _STILL_IN_USE[:] = [(mover, owners) for mover, owners in in_use if owners and not mover.is_quiesced]
        self._close_exports()

    def _close_exports(self) -> None:
        if isinstance(self.role, RankRole) and self.role.exports is not None:
            exports, self.role = self.role.exports, replace(self.role, exports=None)
            self._unsent_fds = ()
            exports.close()

    def check_request_number(self, request: int) -> None:
        """Raise ProtocolError for a reply to another request than the last."""
        if request != self._request:
            raise ProtocolError(
                f"the daemon replied to request {request} where {self._request} was sent", Code.OUT_OF_PLACE
            )


def _register_message(request: int, role: RankRole, exports: MemoryExport) -> worker.Register:
    return worker.Register(
        request=request,
        engine=role.engine,
        layout=role.layout,
        regions=exports.regions,
        incarnation=exports.incarnation,
        placement=exports.placement,
    )


def _check_sendable(role: RankRole, exports: MemoryExport) -> None:
    """Raise EngineError(region-invalid), in the caller's thread, for a registration that no frame carries."""
    try:
        num_bytes = len(encode(_register_message(0, role, exports)))
    except (TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"cannot register {role}: its regions: {error}", Code.REGION_INVALID) from error
    if num_bytes > MAX_REGISTER_BYTES:
        raise EngineError(
            f"cannot register {role}: its layout and regions take {num_bytes} bytes, "
            f"{MAX_REGISTER_BYTES} go; describe fewer tensors or regions",
            Code.REGION_INVALID,
        )


def validated(value: T, what: str) -> T:
    """Return an engine's struct as the daemon will decode it. Raises LayoutError that names the wrong field.

    msgspec checks types when it decodes, not when a struct is made.
    """
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError) as error:
        raise LayoutError(f"cannot register: {what}: {error}") from error
