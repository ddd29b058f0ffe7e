"""The connector in a worker: does what the scheduler decided on one rank, and reports what ended.

Only `suspend` and `resume` wait; vLLM calls them between requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvxferd.client import Delivered, Disconnected, Event, Failed, PullTicket, Quiesced, RankHandle, Suspended
from kvxferd.client.gpu_events import Completion
from kvxferd.engine.registration import resume_regions
from kvxferd.errors import Code, KvxferdError
from kvxferd.integrations.common.sleep import suspend
from kvxferd.integrations.vllm.session.stats import ConnectorStats
from kvxferd.integrations.vllm.session.step_metadata import PullSpec, StepMetadata
from kvxferd.layout import TensorRegion

_LOG = logging.getLogger("vllm.kvxferd.worker")

# How long a pull may wait for a daemon that is not running: a restarted one is found within 2 s. A
# longer wait costs more than what the engine does without the cache.
MAX_DAEMON_WAIT_S = 5.0


@dataclass(slots=True)
class Results:
    """What ended since the last call, by vLLM's request ids. A failed request is also received."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


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
        reports_ready: bool = False,
        recomputes_failed: bool = False,
        record_launched: Callable[[], Completion] | None = None,
    ) -> None:
        """`reports_ready`: whether a transfer is readable once each rank has reported it, and not when it is
        published.

        `recomputes_failed`: whether this engine computes a prompt itself whose pull has failed. Otherwise
        the router decides, which may send the request to another decode engine with the same reference: the
        transfer is left to its lease.

        `record_launched` returns a completion that follows all work launched before. Transfers wait for it
        where vLLM does not wait for all of a step before the next.
        """
        self.stats = ConnectorStats()
        self._rank = rank
        self._deadline_s = deadline_s
        self._reports_ready = reports_ready
        self._recomputes_failed = recomputes_failed
        self._record_launched = record_launched
        self._pulls: dict[str, _PullState] = {}  # by request id, the last of each
        self._by_ticket: dict[PullTicket, _PullState] = {}
        self._results = Results()

    def start_step(self, step: StepMetadata) -> None:
        """Do what the scheduler has decided for this step."""
        for prepared in step.prepares:
            prepare = partial(self._rank.prepare, progressive=prepared.is_early)
            self._send_best_effort(prepare, prepared.ref)
        written = step.written if self._reports_ready else ()
        after = self._record_launched() if self._record_launched and (written or step.pulls) else None
        for spec in written:
            ready = partial(self._rank.ready, tokens=spec.ready_tokens, after=after)
            self._send_best_effort(ready, spec.transfer_id)
        for pulled in step.pulls:
            self._pull(pulled, after)
        for request_id in step.cancels:
            pull = self._pulls.get(request_id)
            if pull is not None and pull.ticket is not None:
                pull.ticket.cancel()
        for ref in step.abandons:  # each rank has prepared it
            self._send_best_effort(self._rank.abandon, ref)
        self._results.sent.update(step.released)

    def collect_results(self) -> Results:
        """Return what ended since the last call."""
        self._handle_events()
        results, self._results = self._results, Results()
        return results

    def suspend(self, timeout_s: float = 60.0) -> None:
        """Block until the daemon has unmapped the rank's memory. Raises KvxferdError (deadline)."""
        suspend(self._rank, self._handle_events, timeout_s)

    def resume(self, regions: Sequence[TensorRegion]) -> None:
        """Register the rank's memory again, after `suspend`. Blocks. Raises KvxferdError.

        Device memory was freed and allocated again at the same addresses.
        """
        resume_regions(self._rank, regions)

    @property
    def is_suspended(self) -> bool:
        """Whether no other process maps the rank's memory, nor will before `resume`."""
        return self._rank.is_suspended

    def close(self) -> None:
        """Close the rank's session."""
        self._rank.close()

    # --- what the scheduler decided

    def _send_best_effort(self, send: Callable[..., None], what: object) -> None:
        """Send a message that may be lost: if the session has ended, the transfer has too."""
        try:
            send(what)
        except KvxferdError as error:
            _LOG.warning("%s", error.message)

    def _pull(self, spec: PullSpec, after: Completion | None) -> None:
        pull = self._pulls[spec.request_id] = _PullState(spec, time.monotonic())
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
        self._by_ticket[pull.ticket] = pull

    # --- events

    def _handle_events(self) -> None:
        for event in self._rank.poll():
            self._handle(event)

    def _handle(self, event: Event) -> None:
        match event:
            case Delivered(ticket=ticket):
                if (pull := self._by_ticket.pop(ticket, None)) is not None:
                    waited_s = time.monotonic() - pull.started_at
                    self.stats.record_pull(waited_s, event.wire_s, event.bytes, event.runs)
                    self._end(pull)
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
                pass  # `suspend` asks the rank
            case Disconnected(code=code, message=message):
                _LOG.error("this rank's cache is out of the daemon's reach: %s (%s); restart the engine",
                           message, code)  # fmt: skip

    def _failed(self, pull: _PullState, code: Code, message: str) -> None:
        spec = pull.spec
        if code is not Code.CANCELLED:
            _LOG.warning("request %s: %s (%s)", spec.request_id, message, code)
            self.stats.record_failed_pull(code)
        if self._recomputes_failed:  # the other ranks need not go on, nor the prefill engine keep the blocks
            self._send_best_effort(self._rank.abandon, spec.ref)
        if self._end(pull):
            self._results.failed.add(spec.request_id)

    def _end(self, pull: _PullState) -> bool:
        """Report the request as received; not where its id has come again, and another pull is under way."""
        request_id = pull.spec.request_id
        if self._pulls.get(request_id) is not pull:
            return False
        del self._pulls[request_id]
        self._results.received.add(request_id)
        return True
