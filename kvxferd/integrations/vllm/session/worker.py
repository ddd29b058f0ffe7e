"""The connector in a worker: does what the scheduler decided on one rank, and reports what ended.

Only `suspend` and `resume` wait; vLLM calls them between requests.
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
from kvxferd.client.gpu_events import Completion
from kvxferd.errors import Code, KvxferdError
from kvxferd.integrations.vllm.session.stats import ConnectorStats
from kvxferd.integrations.vllm.session.step_metadata import ExtendSpec, PublishSpec, PullSpec, StepMetadata

_LOG = logging.getLogger("vllm.kvxferd.worker")

# How long a pull may wait for a daemon that is not running: a restarted one is found within 2 s. A
# longer wait costs more than what the engine does without the cache.
MAX_DAEMON_WAIT_S = 5.0


class BlockCopier(Protocol):
    """Copies between vLLM's tensors and their shared buffers."""

    def copy_out(self, blocks: Mapping[str, BlockList]) -> None:
        """Copy from the tensors, before the blocks are read."""

    def copy_in(self, blocks: Mapping[str, BlockList]) -> None:
        """Copy to the tensors, after the blocks have arrived."""


@dataclass(slots=True)
class Results:
    """What ended since the last call, by vLLM's request ids. A failed request is also received."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_block_ids: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _PullState:
    spec: PullSpec
    started_at: float
    ticket: PullTicket | None = None
    failure: Failed | None = None  # the pull failed, and its blocks are not quiesced yet


class ConnectorWorker:
    """One rank's transfers. It is used by the engine's thread alone."""

    def __init__(
        self,
        rank: RankHandle,
        deadline_s: float,
        *,
        recomputes_failed: bool = False,
        bounce_buffers: BlockCopier | None = None,
        record_launched: Callable[[], Completion] | None = None,
    ) -> None:
        """`recomputes_failed`: whether this engine computes a prompt itself whose pull has failed. Otherwise
        the router decides, which may send the request to another decode engine with the same reference: the
        transfer is left to its lease.

        `record_launched` returns a completion that follows all work launched before. Transfers wait for it
        where vLLM does not wait for all of a step before the next.
        """
        self.stats = ConnectorStats()
        self._rank = rank
        self._deadline_s = deadline_s
        self._recomputes_failed = recomputes_failed
        self._bounce_buffers = bounce_buffers
        self._record_launched = record_launched
        self._copier = ThreadPoolExecutor(1, "kvxferd-copy") if bounce_buffers is not None else None
        self._copies_in: deque[tuple[Future[None], _PullState]] = deque()
        self._copies_out: dict[str, Future[None]] = {}  # by request id, until its blocks are released
        self._pending_releases: set[str] = set()  # request ids whose blocks are still being copied out
        self._pulls: dict[str, _PullState] = {}  # by request id
        self._by_ticket: dict[PullTicket, _PullState] = {}
        self._results = Results()
        self._is_suspended = False

    def start_step(self, step: StepMetadata, *, needs_ready: bool) -> None:
        """Do what the scheduler has decided for this step."""
        for prepared in step.prepares:
            prepare = partial(self._rank.prepare, progressive=prepared.is_early)
            self._send_best_effort(prepare, prepared.ref)
        after = (
            self._record_launched()
            if self._record_launched is not None and (step.extends or step.publishes or step.pulls)
            else None
        )
        for extended in step.extends if needs_ready else ():
            self._report_part(extended, after)
        for published in step.publishes if needs_ready else ():
            self._report_ready(published, after)
        for pulled in step.pulls:
            self._pull(pulled, after)
        for request_id in step.cancels:
            pull = self._pulls.get(request_id)
            if pull is not None and pull.ticket is not None:
                pull.ticket.cancel()
        for ref in step.abandons:  # each rank has prepared it
            self._send_best_effort(self._rank.abandon, ref)
        for request_id in step.released:
            self._release(request_id)

    def collect_results(self) -> Results:
        """Return what ended since the last call."""
        self._handle_events()
        while self._copies_in and self._copies_in[0][0].done():
            copied, pull = self._copies_in.popleft()
            self._finish_copy_in(copied, pull)
        for request_id in [r for r in self._pending_releases if self._copies_out[r].done()]:
            self._release(request_id)
        results, self._results = self._results, Results()
        return results

    def suspend(self, timeout_s: float = 60.0) -> None:
        """Block until the daemon has unmapped the rank's memory. Raises KvxferdError (deadline).

        It may be called again after that: a rank that was suspended meanwhile is not suspended twice.
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
            self._handle_events()

    def resume(self, regions: Sequence[Region]) -> None:
        """Register the rank's memory again, after `suspend`. Blocks. Raises KvxferdError."""
        try:
            self._rank.resume(regions)
        finally:
            # Refused, no process has mapped it. Without a reply the client goes on trying.
            self._is_suspended = self._rank.is_suspended

    @property
    def is_suspended(self) -> bool:
        """Whether no other process maps the rank's memory, nor will before `resume`."""
        return self._is_suspended

    def close(self) -> None:
        """Close the rank's session and finish its copies."""
        if self._copier is not None:
            self._copier.shutdown(wait=True, cancel_futures=True)
        self._rank.close()

    # --- what the scheduler decided

    def _send_best_effort(self, send: Callable[..., None], what: object) -> None:
        """Send a message that may be lost: if the session has ended, the transfer has too."""
        try:
            send(what)
        except KvxferdError as error:
            _LOG.warning("%s", error.message)

    def _pull(self, spec: PullSpec, after: Completion | None) -> None:
        pull = _PullState(spec, time.monotonic())
        if spec.refusal:
            self._failed(pull, Code.BLOCKS_INVALID, spec.refusal)
            return
        deadline_s = self._deadline_s if self._rank.is_connected else min(self._deadline_s, MAX_DAEMON_WAIT_S)
        try:
            pull.ticket = self._rank.pull(
                spec.ref, spec.blocks, spec.num_tokens, deadline_s, after=after, progressive=spec.is_early
            )
        except KvxferdError as error:
            self._failed(pull, error.code, error.message)
            return
        self._pulls[spec.request_id] = pull
        self._by_ticket[pull.ticket] = pull

    def _report_part(self, spec: ExtendSpec, after: Completion | None) -> None:
        """Report how far a request is written. A rank that copies blocks out reports it when it is whole."""
        if self._copier is None:
            report = partial(self._rank.ready, tokens=spec.ready_tokens, after=after)
            self._send_best_effort(report, spec.transfer_id)

    def _report_ready(self, spec: PublishSpec, after: Completion | None) -> None:
        if self._copier is None or self._bounce_buffers is None:
            self._send_best_effort(partial(self._rank.ready, after=after), spec.transfer_id)
            return
        buffers = self._bounce_buffers

        def copy() -> None:
            buffers.copy_out(spec.blocks)
            self._send_best_effort(self._rank.ready, spec.transfer_id)

        self._copies_out[spec.request_id] = copied = self._copier.submit(copy)
        copied.add_done_callback(_log_copy_error)

    def _release(self, request_id: str) -> None:
        """Report a request's blocks as free, once no copy of them is under way.

        A transfer may end before its copy has begun. A later copy would overwrite what the next request
        has pulled into the same blocks, before that is copied in.
        """
        copied = self._copies_out.get(request_id)
        if copied is not None and not (copied.cancel() or copied.done()):
            self._pending_releases.add(request_id)
            return
        self._copies_out.pop(request_id, None)
        self._pending_releases.discard(request_id)
        self._results.sent.add(request_id)

    # --- events

    def _handle_events(self) -> None:
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
                self._by_ticket[ticket].failure = event
                # vLLM would give the blocks to another request at once, so it is informed after Quiesced.
                _LOG.warning("%s (%s); its blocks stay out of use until nothing can write them",
                             event.message, event.code)  # fmt: skip
            case Quiesced(ticket=ticket):
                if (pull := self._by_ticket.pop(ticket, None)) is not None:
                    assert pull.failure is not None
                    self._failed(pull, pull.failure.code, pull.failure.message)
            case Suspended():
                self._is_suspended = True
            case Disconnected(code=code, message=message):
                _LOG.error("this rank's cache is out of the daemon's reach: %s (%s); restart the engine",
                           message, code)  # fmt: skip

    def _delivered(self, pull: _PullState, event: Delivered) -> None:
        self.stats.record_pull(time.monotonic() - pull.started_at, event.wire_s, event.bytes, event.runs)
        if self._copier is not None and self._bounce_buffers is not None:
            self._copies_in.append(
                (self._copier.submit(self._bounce_buffers.copy_in, pull.spec.blocks), pull)
            )
            return
        self._received(pull)

    def _finish_copy_in(self, copied: Future[None], pull: _PullState) -> None:
        if (error := copied.exception()) is None:
            self._received(pull)
        else:
            self._failed(pull, Code.INTERNAL, f"cannot copy the blocks in: {error!r}")

    def _received(self, pull: _PullState) -> None:
        self._pulls.pop(pull.spec.request_id, None)
        self._results.received.add(pull.spec.request_id)

    def _failed(self, pull: _PullState, code: Code, message: str) -> None:
        spec = pull.spec
        self._pulls.pop(spec.request_id, None)
        if code is not Code.CANCELLED:
            _LOG.warning("request %s: %s (%s)", spec.request_id, message, code)
            self.stats.record_failed_pull(code)
        if self._recomputes_failed:  # the other ranks need not go on, nor the prefill engine keep the blocks
            self._send_best_effort(self._rank.abandon, spec.ref)
        self._results.received.add(spec.request_id)
        if spec.block_ids:
            self._results.failed_block_ids.update(spec.block_ids)
        else:
            self._results.failed.add(spec.request_id)


def _log_copy_error(copied: Future[None]) -> None:
    if not copied.cancelled() and (error := copied.exception()) is not None:
        _LOG.error("cannot copy blocks out, their transfer will never be ready", exc_info=error)
