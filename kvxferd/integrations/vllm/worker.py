"""A worker's side: carries out the scheduler's orders on one rank, and says what ended.

Nothing here waits but `suspend` and `resume`, which vLLM calls between requests.
"""

from __future__ import annotations

import logging
import select
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kvxferd.client import (
    BlockList,
    Delivered,
    Disconnected,
    Event,
    Failed,
    PullTicket,
    Quiesced,
    RankHandle,
    Region,
    Suspended,
)
from kvxferd.client.ordering import Completion
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.integrations.vllm.orders import Orders, PullOrder, SendOrder
from kvxferd.integrations.vllm.stats import Tally

_LOG = logging.getLogger("vllm.kvxferd.worker")

# How long a pull may wait for a daemon that is not there: a restarted one is found within 2 s. Whoever
# would wait longer is better off with what the engine does without the cache.
AWAY_S = 5.0


class Mirror(Protocol):
    """Copies between vLLM's tensors and the shared buffers that stand for them."""

    def copy_out(self, blocks: Mapping[str, BlockList]) -> None:
        """From the tensors, before the blocks are read."""

    def copy_in(self, blocks: Mapping[str, BlockList]) -> None:
        """To the tensors, after the blocks have arrived."""


@dataclass(slots=True)
class Results:
    """What ended since the last look, by vLLM's request ids. A failed request is also received."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Pull:
    order: PullOrder
    ordered_at: float
    ticket: PullTicket | None = None
    doubt: Failed | None = None  # it failed, and its blocks are not quiet yet


class WorkerSide:
    """One rank's transfers. One thread, the engine's."""

    def __init__(
        self,
        rank: RankHandle,
        deadline_s: float,
        *,
        speaks_for_engine: bool,
        mirror: Mirror | None = None,
        launched: Callable[[], Completion] | None = None,
    ) -> None:
        """`speaks_for_engine`: of an engine's ranks, the one that says what need be said once.

        `launched` returns what ends with all the work that was launched before: where vLLM does not wait
        for all of a step before the next, transfers do.
        """
        self.tally = Tally()
        self._rank = rank
        self._deadline_s = deadline_s
        self._speaks_for_engine = speaks_for_engine
        self._mirror = mirror
        self._launched = launched
        self._copier = ThreadPoolExecutor(1, "kvxferd-copy") if mirror is not None else None
        self._copies: deque[tuple[Future[None], _Pull]] = deque()
        self._copies_out: dict[str, Future[None]] = {}  # by request id, until its blocks are released
        self._released: set[str] = set()  # request ids whose blocks are still being copied out
        self._pulls: dict[str, _Pull] = {}  # by request id
        self._by_ticket: dict[PullTicket, _Pull] = {}
        self._results = Results()
        self._is_suspended = False

    def carry_out(self, orders: Orders, *, says_ready: bool) -> None:
        """Do what the scheduler has decided with this step."""
        for ref in orders.prepares:
            self._try(self._rank.prepare, ref)
        after = self._launched() if self._launched is not None and (orders.sends or orders.pulls) else None
        for send in orders.sends if says_ready else ():
            self._send(send, after)
        for order in orders.pulls:
            self._pull(order, after)
        for request_id in orders.cancels:
            pull = self._pulls.get(request_id)
            if pull is not None and pull.ticket is not None:
                pull.ticket.cancel()
        for ref in orders.abandons if self._speaks_for_engine else ():
            self._try(self._rank.abandon, ref)
        for request_id in orders.released:
            self._release(request_id)

    def take_results(self) -> Results:
        """Return what ended since the last call."""
        self._hear()
        while self._copies and self._copies[0][0].done():
            copied, pull = self._copies.popleft()
            self._copied(copied, pull)
        for request_id in [r for r in self._released if self._copies_out[r].done()]:
            self._release(request_id)
        results, self._results = self._results, Results()
        return results

    def suspend(self, timeout_s: float = 60.0) -> None:
        """Have the daemon let go of the rank's memory. Blocks until it has. Raises KvxferdError(deadline).

        It may be asked again after that: what was let go of meanwhile is not asked for twice.
        """
        self._rank.suspend()
        deadline = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._rank.fileno(), select.POLLIN)
        while not self._is_suspended:
            left = deadline - time.monotonic()
            if left <= 0:
                raise KvxferdError(
                    f"cannot suspend: the daemon has not let go of the memory for {timeout_s:.0f} s; "
                    "it must not be freed",
                    Code.DEADLINE,
                )
            poller.poll(left * 1000)
            self._hear()

    def resume(self, regions: Sequence[Region]) -> None:
        """Register the rank's memory again, after `suspend`. Blocks. Raises KvxferdError."""
        try:
            self._rank.resume(regions)
        except EngineError:
            raise  # refused: nobody has mapped it
        except KvxferdError:
            self._is_suspended = False  # not answered: the client goes on trying
            raise
        self._is_suspended = False

    def close(self) -> None:
        """The engine stops."""
        if self._copier is not None:
            self._copier.shutdown(wait=True, cancel_futures=True)
        self._rank.close()

    # --- orders

    def _try(self, ask: Callable[..., None], what: object) -> None:
        """Say something that may be lost: if the session is over, so is what it is about."""
        try:
            ask(what)
        except KvxferdError as error:
            _LOG.warning("%s", error.message)

    def _pull(self, order: PullOrder, after: Completion | None) -> None:
        pull = _Pull(order, time.monotonic())
        if order.refusal:
            self._failed(pull, Code.BLOCKS_INVALID, order.refusal)
            return
        deadline_s = self._deadline_s if self._rank.is_connected else min(self._deadline_s, AWAY_S)
        try:
            pull.ticket = self._rank.pull(order.ref, order.blocks, order.num_tokens, deadline_s, after=after)
        except KvxferdError as error:
            self._failed(pull, error.code, error.message)
            return
        self._pulls[order.request_id] = pull
        self._by_ticket[pull.ticket] = pull

    def _send(self, order: SendOrder, after: Completion | None) -> None:
        if self._copier is None or self._mirror is None:
            self._try(partial(self._rank.ready, after=after), order.transfer_id)
            return
        mirror = self._mirror

        def copy() -> None:
            mirror.copy_out(order.blocks)
            self._try(self._rank.ready, order.transfer_id)

        self._copies_out[order.request_id] = copied = self._copier.submit(copy)
        copied.add_done_callback(_complain)

    def _release(self, request_id: str) -> None:
        """Report a request's blocks as free, once nothing copies them.

        A transfer may end before its copy has begun. Done later, the copy would overwrite what the next
        request has pulled into the same blocks, before that is copied in.
        """
        copied = self._copies_out.get(request_id)
        if copied is not None and not (copied.cancel() or copied.done()):
            self._released.add(request_id)
            return
        self._copies_out.pop(request_id, None)
        self._released.discard(request_id)
        self._results.sent.add(request_id)

    # --- events

    def _hear(self) -> None:
        for event in self._rank.poll():
            self._handle(event)

    def _handle(self, event: Event) -> None:
        match event:
            case Delivered(ticket=ticket):
                if (pull := self._by_ticket.pop(ticket, None)) is not None:
                    self._delivered(pull, event)
            case Failed(ticket=ticket, safe_to_reuse=True):
                if (pull := self._by_ticket.pop(ticket, None)) is not None:
                    self._failed(pull, event.code, event.message)
            case Failed(ticket=ticket):
                self._by_ticket[ticket].doubt = event
                # vLLM would give the blocks to another request at once: it hears when they are quiet.
                _LOG.warning("%s (%s); its blocks stay out of use until nothing can write them",
                             event.message, event.code)  # fmt: skip
            case Quiesced(ticket=ticket):
                if (pull := self._by_ticket.pop(ticket, None)) is not None:
                    assert pull.doubt is not None
                    self._failed(pull, pull.doubt.code, pull.doubt.message)
            case Suspended():
                self._is_suspended = True
            case Disconnected(code=code, message=message):
                _LOG.error("this rank's cache is out of the daemon's reach: %s (%s); restart the engine",
                           message, code)  # fmt: skip

    def _delivered(self, pull: _Pull, event: Delivered) -> None:
        self.tally.pulled(time.monotonic() - pull.ordered_at, event.wire_s, event.bytes, event.runs)
        if self._copier is not None and self._mirror is not None:
            self._copies.append((self._copier.submit(self._mirror.copy_in, pull.order.blocks), pull))
            return
        self._received(pull)

    def _copied(self, copied: Future[None], pull: _Pull) -> None:
        if (error := copied.exception()) is None:
            self._received(pull)
        else:
            self._failed(pull, Code.INTERNAL, f"cannot copy the blocks in: {error!r}")

    def _received(self, pull: _Pull) -> None:
        self._pulls.pop(pull.order.request_id, None)
        self._results.received.add(pull.order.request_id)

    def _failed(self, pull: _Pull, code: Code, message: str) -> None:
        order = pull.order
        self._pulls.pop(order.request_id, None)
        if code is not Code.CANCELLED:
            _LOG.warning("request %s: %s (%s)", order.request_id, message, code)
            self.tally.pull_failed(code)
        # The others need not go on, and the prefill engine need not keep the blocks any longer.
        self._try(self._rank.abandon, order.ref)
        self._results.received.add(order.request_id)
        if order.block_ids:
            self._results.bad_blocks.update(order.block_ids)
        else:
            self._results.failed.add(order.request_id)


def _complain(copied: Future[None]) -> None:
    if not copied.cancelled() and (error := copied.exception()) is not None:
        _LOG.error("cannot copy blocks out, their transfer will never be ready", exc_info=error)
