"""What an engine requests of a session: it publishes transfers, reports what is written, and pulls."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from kvxferd.client.events import Emit, PullTicket
from kvxferd.client.fence_slots import FenceSlots
from kvxferd.client.gpu_events import Completion, PendingCompletions
from kvxferd.client.incarnations import KnownIncarnations
from kvxferd.client.outbox import Outbox
from kvxferd.client.publishes import ClientPublish, ClientPublishes
from kvxferd.client.pulls import ClientPull, ClientPulls
from kvxferd.client.registration import MemoryState, RankRole, Registration
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.ids import Endpoint, EngineKey, Incarnation, Ticket, TransferId
from kvxferd.layout import BlocksByGroup, check_continues
from kvxferd.wire import worker
from kvxferd.wire.common import Refusal, TransferRef

CancelPull = Callable[[Ticket], None]


class SessionState(Enum):
    """From no connection to a registered one."""

    DISCONNECTED = auto()  # no connection
    HANDSHAKING = auto()  # Hello is sent
    CONNECTED = auto()  # welcomed, and not registered
    REGISTERING = auto()  # Register, Attach or Resume is sent
    READY = auto()  # the daemon takes requests
    CLOSED = auto()  # the session has ended


class SessionRequests:
    """The part of a session that takes an engine's requests. `ClientSession` has the other: its daemon."""

    def __init__(self, fence: FenceSlots, emit: Emit, random_bytes: Callable[[int], bytes]) -> None:
        self.state = SessionState.DISCONNECTED
        self.close_reason: Refusal | None = None  # why the session is over
        self.epoch = 0  # counts connections
        self.registration = Registration()
        self._pulls = ClientPulls(emit)
        self._publishes = ClientPublishes(fence, emit, random_bytes)
        self._incarnations = KnownIncarnations()
        self._outbox = Outbox(self._pulls, self._publishes)
        self._pending_completions = PendingCompletions()
        self._lease_s = 0.0  # the daemon's default
        self._endpoint = Endpoint("")

    def publish(
        self,
        transfer_id: TransferId,
        blocks: BlocksByGroup,
        *,
        num_tokens: int,
        num_readers: int,
        lease_s: float | None,
        now: float,
        after: Completion | None = None,
        traceparent: str = "",
        ready_tokens: int = -1,
        nonce: str = "",
    ) -> TransferRef:
        """Publish a transfer; it is sent once `after` is done. Raises EngineError, BusyError.

        `ready_tokens`: of `num_tokens`; the rest follows with `ready`. -1: all. `nonce`: the router's.
        """
        what = f"publish {transfer_id}"
        self._check_not_suspended(what)
        if not self._incarnations.all:
            raise EngineError(
                f"cannot {what}: no rank of {self.registration.role} has been registered; register its ranks "
                "first",
                Code.ENGINE_INCOMPLETE,
            )
        lease_s = self._lease_s if lease_s is None else lease_s
        known = self._incarnations.all
        publish = self._publishes.add(
            transfer_id, blocks, num_tokens, num_readers, now + lease_s, known, nonce
        )
        publish.lease_s, publish.ready_tokens = lease_s, ready_tokens
        publish.traceparent = traceparent
        if after is not None:
            publish.awaits_gpu = True
            self._pending_completions.add(
                after,
                lambda: self._publish_written(publish),
                lambda w: self._publishes.gpu_failed(publish, w),
            )
        elif self.state is SessionState.READY:  # else it is sent with the replay
            self._outbox.queue(publish)
        endpoint, engine = self.engine_address()
        ref = TransferRef(endpoint, engine.engine_id, engine.generation, transfer_id, publish.nonce)
        return ref.with_trace(traceparent) if traceparent else ref

    def engine_address(self) -> tuple[Endpoint, EngineKey]:
        """Return the endpoint of the engine's home, as the daemon last named it, and the engine's key.

        Raises KvxferdError once the session is over.
        """
        self._check_open()
        role = self.registration.role
        assert role is not None, "only a session with a role has callers"
        return self._endpoint, EngineKey(role.engine_id, role.generation)

    def add_blocks(self, transfer_id: TransferId, blocks: BlocksByGroup, now: float) -> None:
        """Add blocks to a transfer of this session that grows. Raises EngineError."""
        self._check_not_suspended(f"add blocks to {transfer_id}")
        if self._keep_blocks(transfer_id, blocks, now) and blocks:
            self._outbox.queue(worker.Ready(transfer_id=transfer_id, blocks=blocks))

    def _keep_blocks(self, transfer_id: TransferId, blocks: BlocksByGroup, now: float) -> bool:
        """Add blocks to those that are kept; return whether to send them. Else they go with the publish."""
        publish = self._publishes.get(transfer_id)
        if publish is None or publish.ready_tokens < 0:
            raise EngineError(
                f"cannot add blocks to {transfer_id}: this session has published no transfer of that id that "
                "grows, or it is over",
                Code.TRANSFER_UNKNOWN,
            )
        if isinstance(self.registration.role, RankRole):  # another session does not know the groups
            for group in self.registration.role.layout.groups:
                before, added = publish.blocks.get(group.name), blocks.get(group.name)
                if before is not None and before.ids and added is not None and added.state_at < 0:
                    id_tokens = group.block_tokens * group.token_shard.count
                    check_continues(group.name, before.first_token + len(before) * id_tokens, added)
        self._publishes.add_blocks(publish, blocks, now)
        return publish.sent_epoch == self.epoch and self.state is SessionState.READY

    def ready(
        self,
        transfer_id: TransferId,
        now: float,
        ready_tokens: int = -1,
        after: Completion | None = None,
        blocks: BlocksByGroup | None = None,
    ) -> None:
        """Send that this rank has written so many tokens (-1: all), once `after` is done.

        `blocks` are sent at once, and where nothing is waited for in one message with the report, so that
        the daemon is woken once. Raises EngineError.
        """
        what = f"report {transfer_id} as ready"
        self._check_not_suspended(what)
        publish = self._publishes.get(transfer_id)
        if publish is not None and ready_tokens > publish.num_tokens:
            raise EngineError(f"cannot {what} to {ready_tokens} tokens: it has {publish.num_tokens}")
        written = self._incarnations.own
        if after is None:
            to_send = blocks if blocks and self._keep_blocks(transfer_id, blocks, now) else {}
            self._send_ready(transfer_id, now, written, ready_tokens, to_send)
            return
        if blocks:
            self.add_blocks(transfer_id, blocks, now)
        # Work that fails is never ready: the lease ends the transfer.
        self._pending_completions.add(
            after, lambda: self._send_ready(transfer_id, now, written, ready_tokens, {}), lambda why: None
        )

    def _publish_written(self, publish: ClientPublish) -> None:
        """Queue a publish whose blocks are now written."""
        if self._publishes.gpu_done(publish) and self._takes_requests:
            self._outbox.queue(publish)

    @property
    def _takes_requests(self) -> bool:
        return self.state is SessionState.READY and self.registration.memory_state is MemoryState.SHARED

    def _send_ready(
        self,
        transfer_id: TransferId,
        now: float,
        written: Incarnation,
        ready_tokens: int,
        blocks: BlocksByGroup,
    ) -> None:
        if written != self._incarnations.own or self.registration.memory_state is not MemoryState.SHARED:
            return  # the rank has slept since, and the bytes are gone
        publish = self._publishes.get(transfer_id)
        if publish is None:
            self._publishes.remember_ready(transfer_id, now, written, ready_tokens)
        elif publish.ready_tokens >= 0:  # what is sent again with the publish
            if ready_tokens == publish.num_tokens:
                ready_tokens = -1
            publish.ready_tokens = -1 if ready_tokens < 0 else max(publish.ready_tokens, ready_tokens)
            publish.expires_at = max(publish.expires_at, now + publish.lease_s)
        if self.state is SessionState.READY:  # else it is sent with the replay
            self._outbox.queue(
                worker.Ready(
                    transfer_id=transfer_id, incarnation=written, ready_tokens=ready_tokens, blocks=blocks
                )
            )

    def unpublish(self, transfer_id: TransferId) -> None:
        """Withdraw a transfer. One that is over already is not withdrawn again."""
        self._check_open()
        if self.state is not SessionState.READY:
            self._publishes.release_locally(transfer_id, Code.UNPUBLISHED)
        elif self._publishes.withdraw(transfer_id):
            self._outbox.queue(worker.Unpublish(transfer_id=transfer_id))

    def queue_one_way(self, message: worker.Prepare | worker.Abandon) -> None:
        """Queue a message that has no reply, for the next daemon if there is none now."""
        self._check_open()
        self._outbox.check_room("tell the daemon")
        self._outbox.queue(message)

    def pull(
        self,
        ref: TransferRef,
        blocks: BlocksByGroup,
        num_tokens: int,
        deadline: float,
        cancel: CancelPull,
        after: Completion | None = None,
        *,
        progressive: bool = False,
    ) -> PullTicket:
        """Start a pull; it is sent once `after` is done. Raises EngineError, BusyError."""
        self._check_not_suspended(f"pull {ref.transfer_id}")
        pull = self._pulls.add(ref, blocks, num_tokens, deadline, cancel)
        pull.progressive = progressive
        if after is not None:
            pull.awaits_gpu = True
            self._pending_completions.add(
                after, lambda: self._pull_may_write(pull), lambda why: self._pulls.gpu_failed(pull, why)
            )
        elif self.state is SessionState.READY:  # else it is sent with the replay
            self._outbox.queue(pull)
        return pull.ticket

    def _pull_may_write(self, pull: ClientPull) -> None:
        """Queue a pull whose blocks are free now."""
        pull.awaits_gpu = False
        if self.state is SessionState.READY:
            self._outbox.queue(pull)

    def cancel(self, ticket: Ticket) -> None:
        """End a pull early."""
        if self._pulls.cancel(ticket) and self.state is SessionState.READY:
            self._outbox.queue(worker.Cancel(ticket=ticket))

    def _check_not_suspended(self, what: str) -> None:
        self._check_open()
        self._outbox.check_room(what)
        if self.registration.memory_state is not MemoryState.SHARED:
            raise EngineError(f"cannot {what}: the rank is suspended; resume it first", Code.SUSPENDED)

    def _check_open(self) -> None:
        if self.close_reason is not None:
            raise KvxferdError(f"the session is over: {self.close_reason.message}", self.close_reason.code)
