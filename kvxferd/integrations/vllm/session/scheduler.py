"""The connector in vLLM's scheduler: decides which requests are published and which are pulled.

Nothing here waits: publishing puts a message in the client's outbox. Every decision goes to the
workers in the next step's `StepMetadata`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from kvxferd.client import BlockList, Disconnected, Event, Publisher, PublishRefused, Released, TransferRef
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.integrations.vllm.layout.groups import CacheGroups
from kvxferd.integrations.vllm.session.early_pulls import EarlyPullLimits, EarlyPulls, LateAbandons
from kvxferd.integrations.vllm.session.open_transfers import CacheManager, OpenTransfers
from kvxferd.integrations.vllm.session.request_params import (
    AllocatedBlocks,
    Request,
    has_router_ref,
    is_left_to_router,
    is_prompt_computed,
    params_for_decode,
    ref_from_params,
    traceparent_of,
    wants_publish,
    wants_pull,
)
from kvxferd.integrations.vllm.session.stats import ConnectorStats
from kvxferd.integrations.vllm.session.step_metadata import (
    EngineReport,
    PrepareSpec,
    PublishSpec,
    PullSpec,
    StepMetadata,
)
from kvxferd.wire.limits import MAX_NAME_CHARS

_LOG = logging.getLogger("vllm.kvxferd.scheduler")


class ConnectorScheduler:
    """One engine's transfers in its scheduler. It is used by one thread."""

    def __init__(
        self,
        groups: CacheGroups,
        num_readers: int = 1,
        lease_s: float | None = None,
        *,
        may_pull: bool = True,
        early: EarlyPullLimits | None = None,
    ) -> None:
        """`may_pull`: whether vLLM expects others to write this engine's blocks, and waits for its own.

        `early`: how many requests may wait for running prefills. None: requests are published when they end,
        and pulled when they are published.
        """
        self.stats = ConnectorStats()
        self._may_pull = may_pull
        self._groups = groups
        self._num_readers = num_readers
        self._lease_s = lease_s
        self._publisher: Publisher | None = None
        self._pending_publisher: Future[Publisher] | None = None
        self._has_logged_attach_error = False
        self._needs_ready = False
        self._step = StepMetadata()
        self._sequence = itertools.count(1)
        self._pulling: dict[str, TransferRef] = {}  # request id -> what it reads
        self._published: dict[str, str] = {}  # transfer id -> request id
        self._early_pulls = None if early is None else EarlyPulls(early)
        self._late_abandons = LateAbandons()
        self._open_transfers = OpenTransfers(groups, num_readers, lease_s)

    def attach(self, publisher: Publisher, needs_ready: bool = True) -> None:
        """Publish requests with `publisher` from now on.

        `needs_ready`: whether workers get each publish with the next step. They know themselves whether to
        report ready for it, so True is right, and costs a little, while that is not known here.
        """
        self._publisher = publisher
        self._needs_ready = needs_ready

    def attach_later(self, pending: Future[Publisher], needs_ready: bool) -> None:
        """Do the same once the publisher is open; requests that end before are not published."""
        self._pending_publisher = pending
        self._needs_ready = needs_ready

    def confirm(self, engine: EngineReport) -> bool:
        """Record the engine that the workers report. Return whether its publisher is open, or being opened.

        A publisher of another generation is closed: it was opened by the engine's id, and the daemon had
        another start of it.
        """
        if self._publisher is None:
            return self._pending_publisher is not None
        if self._publisher.generation == engine.generation:
            self._needs_ready = engine.needs_ready
            return True
        _LOG.warning("this engine's workers are of generation %s, and requests were published for %s",
                     engine.generation, self._publisher.generation)  # fmt: skip
        self._publisher.close()
        for event in self._publisher.poll():  # every transfer is released; its fence word is overwritten
            self._handle(event)
        self._publisher = None
        return False

    def bind(self, cache: CacheManager) -> None:
        """Take vLLM's cache manager. Without it no request is published before it ends."""
        if self._early_pulls is not None:
            self._open_transfers.bind(cache)

    @property
    def is_attached(self) -> bool:
        """Whether there is a publisher, or one is being opened."""
        return self._publisher is not None or self._pending_publisher is not None

    # --- the decode engine

    def request_added(self, request: Request) -> None:
        """Handle a new request, long before it is scheduled: the daemon can fetch the manifest and plan.

        It also holds the transfer while the request is in vLLM's queue, which may be longer than its lease.
        """
        if wants_publish(request):
            self._trim_prompt(request)
            if (given := self._router_ref(request)) is not None:
                self._open_transfers.expect(request, given)
        elif wants_pull(request) and (ref := self._usable_ref(request)) is not None:
            self._step.prepares.append(PrepareSpec(ref, self._early_pulls_of(request) is not None))

    def num_tokens_to_pull(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return how many tokens come from the prefill engine, beyond those that are cached here.

        None: vLLM asks again with a later step, because the limit of requests that wait for running prefills
        is reached.
        """
        if not wants_pull(request) or self._usable_ref(request) is None:
            return 0
        count = max(0, self._groups.prefill_tokens(request.num_prompt_tokens) - num_computed_tokens)
        if count and (early := self._early_pulls_of(request)) is not None:
            return count if early.has_room(self._groups.num_blocks(count)) else None
        return count

    def blocks_allocated(self, request: Request, blocks: AllocatedBlocks, num_external_tokens: int) -> None:
        """Pull into the blocks that a request was given, or abandon the transfer if all is cached here."""
        params = request.kv_transfer_params
        if params is None or not wants_pull(request):
            return
        ref = self._usable_ref(request)
        params["do_remote_prefill"] = False  # once for a request, preempted or failed ones included
        if ref is None:
            return
        if num_external_tokens <= 0:
            self._step.abandons.append(ref)
            if has_router_ref(request):
                self._late_abandons.add(ref)
            return
        num_tokens = self._groups.prefill_tokens(request.num_prompt_tokens)
        clipped: Mapping[str, BlockList] = {}
        refusal = ""
        try:
            clipped = self._groups.select_blocks(
                blocks.get_block_ids(), num_tokens, num_tokens - num_external_tokens
            )
        except EngineError as error:
            refusal = error.message  # vLLM already waits for the load: the workers report that it failed
        block_ids = self._groups.block_ids(clipped) if self._groups.can_report_failed_blocks else set()
        early = self._early_pulls_of(request)
        if early is not None:
            early.add(request.request_id, self._groups.num_blocks(num_external_tokens))
        self._step.pulls.append(
            PullSpec(
                request.request_id,
                ref,
                clipped,
                num_tokens,
                frozenset(block_ids),
                is_early=early is not None,
                refusal=refusal,
            )
        )
        self._pulling[request.request_id] = ref

    def pulls_ended(self, request_ids: Sequence[str] | set[str]) -> None:
        """Handle requests whose pulls have ended on every worker."""
        for request_id in request_ids:
            self._pulling.pop(request_id, None)
            if self._early_pulls is not None:
                self._early_pulls.remove(request_id)

    def _early_pulls_of(self, request: Request) -> EarlyPulls | None:
        """Return what counts the request; None where its prefill has ended, or nothing is limited."""
        return self._early_pulls if has_router_ref(request) else None

    # --- the prefill engine

    def request_ended(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Handle the end of a request, whatever its outcome.

        Returns whether its blocks are kept until the workers report it as sent, and the parameters
        that the router passes to the decode engine.
        """
        if (ref := self._pulling.pop(request.request_id, None)) is not None:
            self._step.cancels.append(request.request_id)
            if not is_left_to_router(request):
                self._step.abandons.append(ref)
        if wants_pull(request):  # it never had blocks
            if (ref := self._usable_ref(request)) is not None:
                self._step.abandons.append(ref)
            return False, None
        if not wants_publish(request):
            return False, None
        self._handle_events()
        is_spent = self._open_transfers.is_spent(request)
        is_unwanted = self._open_transfers.is_unwanted(request)
        last = self._open_transfers.end(
            self._publisher, request, block_ids if is_prompt_computed(request) else None
        )
        if last is not None:
            spec = PublishSpec(request.request_id, last.ref.transfer_id, last.blocks, last.num_tokens)
            self._published[last.ref.transfer_id] = request.request_id
            self._step.publishes.append(spec)
            return True, params_for_decode(last.ref)
        if is_unwanted or not is_prompt_computed(request):
            return False, None
        published = self._publish(request, block_ids, None if is_spent else self._router_ref(request))
        return (False, None) if published is None else (True, params_for_decode(published))

    def _router_ref(self, request: Request) -> TransferRef | None:
        """Return the reference by which the router has asked the decode engine already, if it is one of this
        engine's.
        """
        self._check_pending_publisher()
        if not has_router_ref(request):
            return None
        try:
            given = ref_from_params(request.kv_transfer_params or {})
        except EngineError as error:
            _LOG.warning("request %s gets another reference: %s", request.request_id, error.message)
            return None
        if self._publisher is None:
            return None
        if given.generation != self._publisher.generation:
            _LOG.warning("request %s gets another reference: the router's is of generation %s of the engine",
                         request.request_id, given.generation)  # fmt: skip
            return None
        return given

    def _publish(
        self, request: Request, block_ids: Sequence[Sequence[int]], given: TransferRef | None
    ) -> TransferRef | None:
        """Publish a request that has ended; `given` has the id and nonce that its router chose, if it did."""
        self._check_pending_publisher()
        if self._publisher is None:
            _LOG.warning("request %s is not published, its reader will have to compute it: "
                         "this engine is not known to the daemon yet", request.request_id)  # fmt: skip
            self.stats.record_failed_publish(Code.ENGINE_UNKNOWN)
            return None
        if not self._publisher.is_connected:
            # The client would publish it to the next daemon; until then the reader would wait in vain.
            _LOG.warning("request %s is not published, its reader will have to compute it: "
                         "the daemon is away", request.request_id)  # fmt: skip
            self.stats.record_failed_publish(Code.DAEMON_LOST)
            return None
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        name = f"{request.request_id[: MAX_NAME_CHARS - 20]}~{next(self._sequence):x}"
        if given is not None:
            name = given.transfer_id
        try:
            if self._groups.has_state and request.num_computed_tokens > num_tokens:
                raise EngineError(
                    f"cannot publish {name}: its state has gone {request.num_computed_tokens - num_tokens} "
                    "tokens beyond its prompt; ask the prefill engine for max_tokens = 1",
                    Code.BLOCKS_INVALID,
                )
            blocks = self._groups.select_blocks(block_ids, num_tokens)
            ref = self._publisher.publish(
                name,
                blocks,
                num_tokens,
                num_readers=self._num_readers,
                lease_s=self._lease_s,
                traceparent=traceparent_of(request),
                nonce=None if given is None else given.nonce,
            )
        except KvxferdError as error:
            _LOG.warning("request %s is not published, its reader will have to compute it: %s",
                         request.request_id, error.message)  # fmt: skip
            self.stats.record_failed_publish(error.code)
            return None
        self._published[name] = request.request_id
        if self._needs_ready:
            self._step.publishes.append(PublishSpec(request.request_id, name, blocks, num_tokens))
        return ref

    # --- with every step

    def build_step_metadata(
        self, scheduled: Collection[str] = (), preempted: Collection[str] = ()
    ) -> StepMetadata:
        """Return what the workers do in this step.

        Both are request ids: vLLM computes tokens of those in `scheduled`, and has preempted the others.
        """
        self._check_pending_publisher()
        self._handle_events()
        extends = self._open_transfers.advance(self._publisher, scheduled, preempted)
        step, self._step = self._step, StepMetadata()
        step.extends = extends
        step.abandons += self._late_abandons.pop_due()
        pulled = {spec.ref for spec in step.pulls} | set(step.abandons)
        step.prepares = [spec for spec in step.prepares if spec.ref not in pulled]
        return step

    @property
    def has_pending_frees(self) -> bool:
        """Whether blocks come free by themselves, so that vLLM need not preempt a request for them."""
        return self._open_transfers.has_pending_frees(self._publisher)

    def close(self) -> None:
        """Close the publisher, which releases what is published."""
        if self._publisher is not None:
            self._publisher.close()
        if self._pending_publisher is not None:
            self._pending_publisher.add_done_callback(_close_when_open)

    def _check_pending_publisher(self) -> None:
        if (
            self._pending_publisher is None
            or self._publisher is not None
            or not self._pending_publisher.done()
        ):
            return
        if (error := self._pending_publisher.exception()) is None:
            self._publisher, self._pending_publisher = self._pending_publisher.result(), None
        elif not self._has_logged_attach_error:
            self._has_logged_attach_error = True
            _LOG.error("nothing can be published: %s; restart the engine", error)

    def _handle_events(self) -> None:
        for event in self._publisher.poll() if self._publisher is not None else ():
            self._handle(event)

    def _handle(self, event: Event) -> None:
        match event:
            case Released(transfer_id=released, why=why):
                self._release(released, why)
                if why is not Code.COMPLETED and why is not Code.ABANDONED:
                    self.stats.record_unread_release(why)
                    _LOG.info("transfer %s was released without being read: %s", released, why)
            case PublishRefused(transfer_id=refused, code=code, message=message):
                _LOG.warning("%s (%s)", message, code)
                self.stats.record_failed_publish(code)
                self._release(refused)
            case Disconnected(code=code, message=message):
                _LOG.error("nothing can be published any more: %s (%s); restart the engine", message, code)
                for transfer_id in list(self._published):
                    self._release(transfer_id)
                self._open_transfers.released_all()

    def _release(self, transfer_id: str, why: Code | None = None) -> None:
        self._open_transfers.released(transfer_id, why)
        if (request_id := self._published.pop(transfer_id, None)) is not None:
            self._step.released.append(request_id)

    def _usable_ref(self, request: Request) -> TransferRef | None:
        params = request.kv_transfer_params or {}
        try:
            if not self._may_pull:
                raise EngineError(
                    "cannot pull into an engine of kv_role kv_producer: vLLM gives it blocks that its own "
                    "steps may still be writing; start it with kv_consumer or kv_both",
                    Code.NOT_ALLOWED,
                )
            ref = ref_from_params(params)
        except EngineError as error:
            _LOG.warning("request %s is computed here: %s", request.request_id, error.message)
            params["do_remote_prefill"] = False
            self.stats.record_failed_pull(error.code)
            return None
        # The trace of this engine's request; without one that of the prefill engine's, in the reference.
        trace = traceparent_of(request)
        return ref.with_trace(trace) if trace else ref

    def _trim_prompt(self, request: Request) -> None:
        """Remove the tokens from the prompt that the decode engine computes itself.

        Not where log probabilities of the prompt are asked for: those of the last tokens would be missing,
        and the decode engine computes the whole prompt anyway.
        """
        count = self._groups.num_tokens_left_to_decode
        if count and request.num_prompt_tokens > count and not request.get_skip_reading_prefix_cache():
            drop_last_tokens(request, count)


def _close_when_open(pending: Future[Publisher]) -> None:
    if pending.exception() is None:
        pending.result().close()


def drop_last_tokens(request: Any, count: int) -> None:
    """Remove the last `count` prompt tokens from a request that is not scheduled yet, once.

    A state is valid at one token only. The decode engine must compute the last prompt token to have
    logits to sample from, and needs the state before it.
    """
    params: Mapping[str, Any] = request.kv_transfer_params
    if params.get("_kvxferd_shortened"):
        return
    if request.prompt_token_ids is not None:
        del request.prompt_token_ids[-count:]
    elif getattr(request, "prompt_embeds", None) is not None:
        request.prompt_embeds = request.prompt_embeds[:-count]
    else:
        return
    del request._all_token_ids[-count:]
    request.num_prompt_tokens -= count
    request.max_tokens = 1
    request.kv_transfer_params["_kvxferd_shortened"] = True
