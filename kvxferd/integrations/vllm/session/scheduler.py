"""The connector in vLLM's scheduler: decides which requests are published and which are pulled.

Nothing here waits: publishing puts a message in the client's outbox. Every decision goes to the
workers in the next step's `StepMetadata`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvxferd.client import BlockList, TransferRef
from kvxferd.errors import Code, EngineError
from kvxferd.integrations.vllm.layout.groups import CacheGroups
from kvxferd.integrations.vllm.session.early_pulls import EarlyPullLimits, EarlyPulls, LateAbandons
from kvxferd.integrations.vllm.session.publishing import Publishing
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
from kvxferd.integrations.vllm.session.step_metadata import PrepareSpec, PullSpec, StepMetadata, WrittenSpec

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
        self.publishing = Publishing(groups, self.stats, num_readers, lease_s)
        self._may_pull = may_pull
        self._groups = groups
        self._step = StepMetadata()
        self._pulling: dict[str, TransferRef] = {}  # request id -> what it reads
        self._early_pulls = None if early is None else EarlyPulls(early)
        self._late_abandons = LateAbandons()

    # --- the decode engine

    def request_added(self, request: Request) -> None:
        """Handle a new request, long before it is scheduled: the daemon can fetch the manifest and plan.

        It also holds the transfer while the request is in vLLM's queue, which may be longer than its lease.
        """
        if wants_publish(request):
            self._trim_prompt(request)
            self.publishing.expect(request)
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
        early = self._early_pulls_of(request)
        if early is not None:
            early.add(request.request_id, self._groups.num_blocks(num_external_tokens))
        self._step.pulls.append(
            PullSpec(
                request.request_id,
                ref,
                clipped,
                num_tokens,
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
        self._step.released += self.publishing.handle_events()
        ref = self.publishing.end(request, block_ids, is_computed=is_prompt_computed(request))
        if ref is None:
            return False, None
        self._step.written.append(WrittenSpec(ref.transfer_id))
        return True, params_for_decode(ref)

    # --- with every step

    def build_step_metadata(
        self, scheduled: Collection[str] = (), preempted: Collection[str] = ()
    ) -> StepMetadata:
        """Return what the workers do in this step.

        Both are request ids: vLLM computes tokens of those in `scheduled`, and has preempted the others.
        """
        self._step.released += self.publishing.handle_events()
        written = self.publishing.advance(scheduled, preempted)
        step, self._step = self._step, StepMetadata()
        step.written = written + step.written
        step.abandons += self._late_abandons.pop_due()
        pulled = {spec.ref for spec in step.pulls} | set(step.abandons)
        step.prepares = [spec for spec in step.prepares if spec.ref not in pulled]
        return step

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
