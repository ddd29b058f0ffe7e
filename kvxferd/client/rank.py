"""`Publisher` and `RankHandle`: the calls of an engine that is registered."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType

from kvxferd.client.arguments import as_int, as_seconds, check_name, pack_blocks
from kvxferd.client.connection import Connection
from kvxferd.client.events import Event, PullTicket
from kvxferd.client.gpu_events import Completion, unfinished
from kvxferd.client.memory_export import Regions, export_memory
from kvxferd.client.refs import check_nonce, make_ref
from kvxferd.client.registration import MemoryState
from kvxferd.client.session_requests import SessionState
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.ids import TransferId
from kvxferd.layout import BlockList, EngineSpec, RankLayout
from kvxferd.wire import worker
from kvxferd.wire.common import RefLike, TransferRef
from kvxferd.wire.traceparent import read_traceparent


class Publisher:
    """A session that publishes for an engine. Thread-safe; no call waits for a daemon.

    Every call raises KvxferdError with the session's code once the session is over, EngineError for an
    invalid argument or a call out of place, and BusyError (with `retry_after_s`) where a limit is reached.
    """

    def __init__(self, connection: Connection, groups: Mapping[str, str] | None = None) -> None:
        self._connection = connection
        self._session = connection.session
        self._groups = groups  # the names of the engine's; None where they are not known here

    @property
    def generation(self) -> str:
        """The engine's generation that this session publishes for."""
        role = self._session.registration.role
        return str(role.generation) if role is not None else ""

    def reference(self, transfer_id: str, nonce: str | None = None) -> TransferRef:
        """Return the reference of a transfer that this engine is going to publish, for its readers.

        Publish it with this `transfer_id` and the reference's `nonce`; a pull with `progressive=True` may
        come first. `nonce`: as `publish` takes it.

        Raises:
            EngineError: an invalid id (`transfer-unknown`) or nonce (`bad-request`).
            KvxferdError: the session is over.
        """
        with self._connection.lock:
            endpoint, engine = self._session.engine_address()
        return make_ref(endpoint, engine.engine_id, engine.generation, transfer_id, nonce)

    def publish(
        self,
        transfer_id: str,
        blocks: Mapping[str, BlockList],
        num_tokens: int,
        num_readers: int = 1,
        lease_s: float | None = None,
        after: Completion | None = None,
        traceparent: str | None = None,
        ready_tokens: int | None = None,
        nonce: str | None = None,
    ) -> TransferRef:
        """Make a request's blocks readable by `num_readers` engines. Returns the reference that readers need.

        Every byte of the blocks must be written when this is called: every layer, draft layers and state
        copies included. On a GPU that is when the kernels are done, not when they are launched: call it
        after the engine's own synchronisation, or pass `after`. With `after` this also returns at once, and
        the transfer is sent to the daemon when `after.query()` is true (a reader that comes more than a
        second before that is refused). If `query` raises, `PublishRefused` with the code `device-error`
        follows.

        The transfer is bound to the memory of the engine's ranks, as the daemon last reported it to this
        session: it does so before `attach` and `register` return, and whenever a rank registers or resumes.
        If a rank sleeps, or returns with other memory, before the transfer is read, even while no daemon is
        there, the transfer ends with the code `rank-lost`: publish what is in the ranks' memory now. An
        engine that declares `publish_implies_ready` is refused with `transfer-not-ready` unless all its
        ranks were reported; else a rank that was not reported is bound by its own `ready`.

        Until `Released` or `PublishRefused` names the transfer, its blocks must stay referenced and
        unchanged: through preemption, prefix-cache reset and weight updates.

        Args:
            transfer_id: 1 to 256 characters. Use an id once in an engine's generation: another rank may not
                have received yet that the first use is over.
            blocks: the request's blocks in every group of the engine, by the group's name. Pipeline stages
                may hold different groups; each rank reads its own.
            num_tokens: the tokens that the blocks hold, counted from the request's first.
            num_readers: the engines that will read it; the transfer is released once all have.
            lease_s: seconds until the transfer expires unread; readers extend it. None: the daemon's default.
            after: an event recorded behind the last kernel that writes the blocks (`torch.cuda.Event`).
            traceparent: the header of that name of the request (W3C Trace Context). The reference carries
                it, and the daemons of both nodes join their spans to that trace. One that is not valid is
                ignored.
            ready_tokens: how many of `num_tokens` are written; the rest follows with `add_blocks` and, on
                every rank, `RankHandle.ready`. None: all of them.
            nonce: chosen by the router, which made the reference with `make_ref` before the prefill began:
                32 to 256 characters that nobody can guess. None: a new one.

        Raises:
            EngineError: invalid blocks (`blocks-invalid`), an id that is in use or used up
                (`transfer-exists`), no rank reported yet (`engine-incomplete`), a suspended rank
                (`suspended`), a lease that cannot be (`bad-request`).
            BusyError: 4,096 transfers of this session are not released, or the daemon is far behind.
            KvxferdError: the session is over.
        """
        what = f"publish {transfer_id!r:.80}"
        name = TransferId(check_name(transfer_id, "a transfer id", Code.BLOCKS_INVALID))
        packed = pack_blocks(blocks, self._groups, what)
        tokens = as_int(num_tokens, "num_tokens", 1, what)
        readers = as_int(num_readers, "num_readers", 1, what)
        lease = None if lease_s is None else as_seconds(lease_s, "lease_s", what)
        ready = -1 if ready_tokens is None else as_int(ready_tokens, "ready_tokens", 0, what)
        if ready > tokens:
            raise EngineError(f"cannot {what}: {ready} of {tokens} tokens cannot be ready")
        given_nonce = check_nonce(nonce) if nonce is not None else ""
        with self._connection.lock:
            ref = self._session.publish(
                name,
                packed,
                num_tokens=tokens,
                num_readers=readers,
                lease_s=lease,
                now=time.monotonic(),
                after=unfinished(after),
                traceparent=read_traceparent(traceparent),
                ready_tokens=ready,
                nonce=given_nonce,
            )
            self._connection.flush()
        return ref

    def add_blocks(self, transfer_id: str, blocks: Mapping[str, BlockList]) -> None:
        """Add blocks to a transfer that was published with `ready_tokens`: those behind the earlier ones.

        A list's `first_token` is 0, or the token at which the group's earlier blocks end. Nobody reads the
        blocks before every rank has called `RankHandle.ready` for their tokens. In the end each group of
        the engine must have its blocks, for all of `num_tokens`. Blocks that the daemon finds not to fit, an
        id that is wrong or listed twice among them, end the whole transfer (`Released` with the code
        `blocks-invalid`). Raises EngineError (`transfer-unknown`, `blocks-invalid`).
        """
        name = TransferId(check_name(transfer_id, "a transfer id", Code.BLOCKS_INVALID))
        packed = pack_blocks(blocks, self._groups, f"add blocks to {name:.80}")
        with self._connection.lock:
            self._session.add_blocks(name, packed, time.monotonic())
            self._connection.flush()

    def unpublish(self, ref: RefLike) -> None:
        """Withdraw a transfer. The engine may use its blocks again at `Released`, not before."""
        transfer = TransferRef.parse(ref)
        with self._connection.lock:
            self._session.unpublish(transfer.transfer_id)
            self._connection.flush()

    def poll(self) -> list[Event]:
        """Return and remove the events since the last call, oldest first. Never waits, never raises."""
        return self._connection.drain_events()

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are events: for select, poll, asyncio."""
        return self._connection.fileno()

    @property
    def is_connected(self) -> bool:
        """Whether a daemon takes requests now. Requests without one are accepted and sent to the next."""
        return self._session.state is SessionState.READY

    @property
    def is_over(self) -> bool:
        """Whether the session has ended, and no event is to come but those that `poll` returns at once."""
        return self._connection.is_over

    @property
    def is_suspended(self) -> bool:
        """Whether `Suspended` was emitted, and `resume` was not called since: of a rank alone."""
        return self._session.registration.memory_state is MemoryState.SUSPENDED

    def call_at_close(self, call: Callable[[], None]) -> None:
        """Have this called by `close`, once nothing of the session needs what it releases."""
        self._connection.call_at_close(call)

    def close(self) -> None:
        """End the session: transfers are released, pulls fail. `poll` still returns the events that are left.

        A pull that the daemon was reading fails with `safe_to_reuse` False, and no Quiesced follows: let
        pulls end, or `suspend`, before closing. A resident rank's mover is ended first, within two
        seconds, and its pulls fail safely; only where that does not succeed
        (`RankHandle.memory_in_use` is then True) must the memory stay until the process exits.
        """
        self._connection.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RankHandle(Publisher):
    """A registered rank: it publishes transfers and pulls others into its memory."""

    def __init__(self, connection: Connection, engine: EngineSpec, layout: RankLayout) -> None:
        groups = {str(group.name): str(group.name) for group in layout.groups}
        # It publishes for all stages, which may hold other groups: only the daemon has the list of them.
        super().__init__(connection, groups if engine.pp_size == 1 else None)
        self.spec, self.layout, self._own_groups = engine, layout, groups

    def __enter__(self) -> RankHandle:
        return self

    def ready(
        self,
        transfer_id: str,
        tokens: int | None = None,
        blocks: Mapping[str, BlockList] | None = None,
        after: Completion | None = None,
    ) -> None:
        """Report that this rank has written a transfer's blocks, or so many tokens of them.

        Tokens [0, tokens) are written in every layer, draft layers too, and will not change. Kernels that are
        launched are not done: `after` is an event behind the last of them, as in `publish`. The report holds
        for the memory that the rank has now, and ends when the rank sleeps.

        It may come before the publish, and `publish` implies it for the rank that publishes. No reader gets
        a token before every rank has reported it; where the engine declares `publish_implies_ready`, the
        publisher reports for all ranks.

        Of a transfer that was published with `ready_tokens` each call renews the lease. What an engine must
        take back (preemption, recomputation) it unpublishes, and uses the blocks again at `Released`, not
        before. States, and the blocks of a sliding window, are read at the end alone: an engine may leave
        them out until the last call, and free older blocks of a window meanwhile.

        Args:
            transfer_id: of a transfer of this engine.
            tokens: counted from the request's first; None: all, on the last call.
            blocks: more blocks of the request, as for `add_blocks`, where this session has published it.
            after: an event behind the last kernel that writes those tokens, as in `publish`.

        Raises:
            EngineError: `transfer-unknown` or `blocks-invalid` for `blocks`, more tokens than the transfer
                has, a suspended rank (`suspended`), `bad-request` for an `after` without `query`.
        """
        name = TransferId(check_name(transfer_id, "a transfer id", Code.BLOCKS_INVALID))
        what = f"report {name:.80} as ready"
        ready_tokens = -1 if tokens is None else as_int(tokens, "tokens", 0, what)
        packed = pack_blocks(blocks, self._groups, what) if blocks else None
        with self._connection.lock:
            self._session.ready(name, time.monotonic(), ready_tokens, unfinished(after), packed)
            self._connection.flush()

    def prepare(self, ref: RefLike, progressive: bool = False) -> None:
        """Announce a pull of this transfer: the daemon connects to the source and plans meanwhile.

        From when the source is ready it keeps the transfer's blocks for this rank, however long the request
        waits here: until the pull or `abandon`, for the daemon's `transfer.max_hold_s` at most.
        `progressive`: as the pull will be.

        Raises EngineError (`transfer-unknown`) for a reference that `publish` did not return.
        """
        message = worker.Prepare(ref=TransferRef.parse(ref), progressive=progressive)
        with self._connection.lock:
            self._session.queue_one_way(message)
            self._connection.flush()

    def pull(
        self,
        ref: RefLike,
        blocks: Mapping[str, BlockList],
        num_tokens: int,
        deadline_s: float,
        after: Completion | None = None,
        progressive: bool = False,
    ) -> PullTicket:
        """Read a transfer into these blocks. One terminal event follows: Delivered or Failed.

        Until then nothing else may write the blocks: no kernel that was launched earlier, zeroing
        included. A kernel launched after Delivered sees the bytes, on any stream.

        The event comes within its time, whichever process dies (plus half a second if the daemon is
        stuck). After a Failed that is not `safe_to_reuse` the blocks stay out of use until Quiesced.

        Args:
            ref: what `publish` returned, also as a dict, or as JSON text or bytes.
            blocks: this rank's blocks to write, by the group's name. `first_token` of each list is where
                it begins in the request: tokens before it are not read.
            num_tokens: the tokens to read up to, counted from the request's first; at most the published
                number.
            deadline_s: seconds from now within which the pull ends; of a progressive pull, from when all is
                ready.
            after: where earlier kernels still use the blocks (to zero them, or for the request that had
                them before), an event recorded behind the last: the read begins when `after.query()` is
                true.
            progressive: read what is ready, then what becomes ready, also of a transfer that is published
                later (its engine must be registered). Only the last piece is then waited for after the
                source's end. The pull fails where its transfer ends, at the end of its lease without progress
                at the latest, or is not ready within the daemon's `transfer.max_hold_s`.

        Returns:
            The ticket that every event of this pull carries.

        Raises:
            EngineError: an invalid reference (`transfer-unknown`) or invalid blocks (`blocks-invalid`), a
                suspended rank (`suspended`), a deadline that cannot be (`bad-request`).
            BusyError: 65,536 pulls of this session have not ended, or the daemon is far behind.
            KvxferdError: the session is over.
        """
        source = TransferRef.parse(ref)
        what = f"pull {source.transfer_id}"
        packed = pack_blocks(blocks, self._own_groups, what)
        tokens = as_int(num_tokens, "num_tokens", 1, what)
        deadline = time.monotonic() + as_seconds(deadline_s, "deadline_s", what)
        with self._connection.lock:
            ticket = self._session.pull(
                source,
                packed,
                tokens,
                deadline,
                self._connection.cancel,
                unfinished(after),
                progressive=progressive,
            )
            self._connection.flush()
        return ticket

    def abandon(self, ref: RefLike) -> None:
        """Report that no rank of this rank's engine will read the transfer any more.

        It ends what this rank has prepared: have every rank call it that has.
        """
        message = worker.Abandon(ref=TransferRef.parse(ref))
        with self._connection.lock:
            self._session.queue_one_way(message)
            self._connection.flush()

    @property
    def memory_in_use(self) -> bool:
        """Whether a mover may still read or write the rank's memory: False after `Suspended`.

        After `close` it is False only for a resident rank whose mover has ended. The daemon ends a child
        mover within moments, but the client is not informed of that any more.
        """
        return not self._session.registration.is_unmapped_elsewhere

    @property
    def is_resident(self) -> bool:
        """Whether its mover is a thread of this process, also while it is suspended."""
        return self._session.registration.launches_movers

    def suspend(self) -> None:
        """Request that the daemon unmaps the rank's memory, which may be freed only after `Suspended`."""
        with self._connection.lock:
            self._session.suspend()
            self._connection.wake()

    def resume(self, regions: Regions, timeout_s: float = 30.0) -> None:
        """Register the rank's memory again, after `Suspended`. Blocks until the daemon has mapped it.

        Args:
            regions: the memory of each region, as in `Client.register`.
            timeout_s: seconds to wait for the daemon's reply.

        Raises:
            EngineError: the daemon refused, with its code: the rank stays suspended. Or the rank is not
                suspended (`out-of-place`).
            KvxferdError: no reply within `timeout_s` (`deadline`, or `daemon-lost` while no daemon is there):
                the client goes on trying until `suspend` is called.
        """
        exports = export_memory(self.layout, regions)
        connection = self._connection
        with connection.lock:
            try:
                self._session.resume(exports)
            except KvxferdError:
                exports.close()
                raise
            except OSError as error:  # no descriptor is left: the next connection offers the memory again
                why = f"cannot start a resident mover: {error.strerror}"
                connection.request_disconnect(why=why)
            connection.wake()
            connection.wait_replied(f"resume {self._session.registration.role}", timeout_s)
