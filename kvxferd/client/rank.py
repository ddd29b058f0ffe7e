"""What an engine holds after it has joined: a publisher, or a rank with memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

from kvxferd.client.blocking import error_from_refusal, wait_for_reply
from kvxferd.client.blocks import BlockList, as_int, pack_blocks
from kvxferd.client.connection import Connection
from kvxferd.client.events import Event, PullTicket
from kvxferd.client.gpu_events import Completion, unfinished
from kvxferd.client.memory_export import Regions, export_memory
from kvxferd.client.refs import RefLike, TransferRef, check_name, read_ref
from kvxferd.client.standing import SessionState
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.ids import TransferId
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.wire import worker

MAX_SECONDS = 10 * 365 * 24 * 3600.0  # a time beyond this is a mistake in units; clocks and timers take it


class Publisher:
    """A session that publishes for an engine. Thread-safe; nothing here waits for a daemon.

    Every call raises KvxferdError with the session's code once the session is over, EngineError for
    what cannot be asked, and BusyError where a limit is reached.
    """

    def __init__(self, connection: Connection, groups: frozenset[str] | None = None) -> None:
        self._connection = connection
        self._session = connection.session
        self._groups = groups  # of the engine; None where they are not known here

    def publish(
        self,
        transfer_id: str,
        blocks: Mapping[str, BlockList],
        num_tokens: int,
        num_readers: int = 1,
        lease_s: float | None = None,
        after: Completion | None = None,
    ) -> TransferRef:
        """Let a request's cache be read, by `num_readers` engines. Returns what readers need.

        Every byte of the blocks must be written when this is called: every layer, draft layers and state
        copies included. On a GPU that is when the kernels are done, not when they are launched: call it
        after the engine's own synchronisation, or give `after`, an event recorded behind the last of
        them (`torch.cuda.Event`). Then this returns at once as always, and the daemon hears of the transfer
        when `after.query()` is true (a reader that is a second earlier than that is refused). If it
        raises, `PublishRefused` with the code `device-error` follows.

        `blocks` lists every group of the engine; its stages may hold different ones, and each rank reads its
        own.

        The transfer is bound to the memory that the engine's ranks have, as far as this session knows when
        this is called: the daemon reports it before `attach` and `register` return, and whenever a rank comes
        or resumes. If a rank sleeps, or comes back with other memory, before the transfer is read, even while
        no daemon is there, it ends with the code `rank-lost`: publish what is in the ranks' memory now. A
        session that knows no rank yet raises `engine-incomplete`. An engine that declares
        `publish_implies_ready` is refused with `transfer-not-ready` unless all its ranks were known; else a
        rank that was not known is bound by its own `ready`.

        From here until `Released` or `PublishRefused` names the transfer, its blocks must stay
        referenced and unchanged: through preemption, prefix-cache reset and weight updates. The
        lease is the daemon's default where `lease_s` is None; readers extend it. Use an id once in
        an engine's generation: another rank may not have heard yet that the first use is over.
        """
        what = f"publish {transfer_id!r:.80}"
        name = TransferId(check_name(transfer_id, "a transfer id", Code.BLOCKS_INVALID))
        packed = pack_blocks(blocks, self._groups, what)
        tokens = as_int(num_tokens, "num_tokens", 1, what)
        readers = as_int(num_readers, "num_readers", 1, what)
        lease = None if lease_s is None else _seconds(lease_s, "lease_s", what)
        with self._connection.lock:
            ref = self._session.publish(
                name,
                packed,
                num_tokens=tokens,
                num_readers=readers,
                lease_s=lease,
                now=time.monotonic(),
                after=unfinished(after),
            )
            self._connection.flush()
        return ref

    def unpublish(self, ref: RefLike) -> None:
        """Ask for a transfer's blocks back. They are the engine's at `Released`, not before."""
        transfer = read_ref(ref)
        with self._connection.lock:
            self._session.unpublish(transfer.transfer_id)
            self._connection.flush()

    def poll(self) -> list[Event]:
        """Return the events since the last call, oldest first. Never waits, never raises."""
        return self._connection.drain_events()

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are events: for select, poll, asyncio."""
        return self._connection.fileno()

    @property
    def is_connected(self) -> bool:
        """Whether a daemon takes requests at this moment. Requests are taken without one too."""
        return self._session.state is SessionState.READY

    def close(self) -> None:
        """End the session: transfers are released, pulls fail. `poll` still returns what is left.

        A pull that the daemon was reading fails with `safe_to_reuse` False, and nothing will say
        when its blocks are quiet: let pulls end, or `suspend`, before closing. A resident rank's mover
        is ended first, within two seconds, and its pulls fail safely; only where that does not succeed
        (`RankHandle.may_be_touched` is then True) must the memory stay until the process exits.
        """
        self._connection.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RankHandle(Publisher):
    """A registered rank: source and sink of transfers."""

    def __init__(self, connection: Connection, engine: EngineSpec, layout: RankLayout) -> None:
        groups = frozenset(group.name for group in layout.groups)
        # It publishes for all stages, and others may hold other groups: the daemon knows them.
        super().__init__(connection, groups if engine.pp_size == 1 else None)
        self._layout, self._own_groups = layout, groups

    def __enter__(self) -> RankHandle:
        return self

    def ready(self, transfer_id: str, after: Completion | None = None) -> None:
        """Say that this rank has finished writing a transfer's blocks: every layer, draft layers too.

        Kernels that are launched are not done: `after` is an event behind the last of them, as in `publish`.

        May be said before the transfer is published; a rank that publishes says it by that. Nobody
        reads until every rank has said it, unless the engine declares `publish_implies_ready`. It holds for
        the memory that the rank has now, and ends when the rank sleeps.
        """
        name = TransferId(check_name(transfer_id, "a transfer id", Code.BLOCKS_INVALID))
        with self._connection.lock:
            self._session.ready(name, time.monotonic(), unfinished(after))
            self._connection.flush()

    def prepare(self, ref: RefLike) -> None:
        """Say that a pull of this transfer will follow: the daemon shakes hands and plans meanwhile."""
        message = worker.Prepare(ref=read_ref(ref))
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
    ) -> PullTicket:
        """Read a transfer into these blocks. One terminal event follows: Delivered or Failed.

        Until then nothing else may write the blocks: no kernel that is launched already, zeroing
        included. Where earlier kernels still use them (to zero them, or for the request that had them
        before), give `after`, an event recorded behind the last: the read begins when `after.query()` is
        true. A kernel launched after Delivered sees the bytes, on any stream.

        The event comes within `deadline_s`, whatever dies (and half a second, if it is the daemon that is
        stuck); after a Failed that is not `safe_to_reuse` the blocks stay out of use until Quiesced.
        """
        source = read_ref(ref)
        what = f"pull {source.transfer_id}"
        packed = pack_blocks(blocks, self._own_groups, what)
        tokens = as_int(num_tokens, "num_tokens", 1, what)
        deadline = time.monotonic() + _seconds(deadline_s, "deadline_s", what)
        with self._connection.lock:
            ticket = self._session.pull(
                source, packed, tokens, deadline, self._connection.cancel, unfinished(after)
            )
            self._connection.flush()
        return ticket

    def abandon(self, ref: RefLike) -> None:
        """Say that this rank's engine will not read the transfer any more, on any rank."""
        message = worker.Abandon(ref=read_ref(ref))
        with self._connection.lock:
            self._session.queue_one_way(message)
            self._connection.flush()

    @property
    def memory_in_use(self) -> bool:
        """Whether a mover may still read or write the rank's memory: False after `Suspended`.

        After `close` it is False only for a resident rank whose mover has ended: of a child, whose
        daemon ends it within moments, nothing is known any more.
        """
        return not self._session.registration.is_unmapped_elsewhere

    @property
    def may_be_touched(self) -> bool:
        """The former name of `memory_in_use`."""
        return self.memory_in_use

    def suspend(self) -> None:
        """Have the daemon let go of the rank's memory. It may be freed only after `Suspended`."""
        with self._connection.lock:
            self._session.suspend()
            self._connection.wake()

    def resume(self, regions: Regions, timeout_s: float = 30.0) -> None:
        """Register the rank's memory again, after `Suspended`. Blocks until the daemon has mapped it.

        Raises EngineError with the daemon's code when it refuses: the rank stays suspended. After a
        timeout (KvxferdError, deadline) the client goes on trying; `suspend` gives up.
        """
        exports = export_memory(self._layout, regions)
        connection = self._connection
        with connection.lock:
            try:
                self._session.resume(exports)
            except KvxferdError:
                exports.close()
                raise
            connection.wake()
            refusal = wait_for_reply(connection, f"resume {self._session.registration.role}", timeout_s)
            if refusal is not None:
                raise error_from_refusal(refusal)


def _seconds(value: float, name: str, what: str) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"cannot {what}: {name} must be seconds, not {value!r:.80}") from error
    if not 0 < seconds <= MAX_SECONDS:  # NaN is not in between either
        raise EngineError(f"cannot {what}: {name} is {seconds}, must be positive and at most {MAX_SECONDS:g}")
    return seconds
