"""A prefill engine's published transfers, in its scheduler.

A request is published when it ends. Where the router asks both engines at once, it gives the prefill engine
the reference that it also gives the decode engine, and the request is published early: when its first chunk
is scheduled, without blocks. With a later step come the blocks that earlier steps have filled: the workers
report them behind the work that they launched before, so behind the forward pass that wrote them. The last
blocks come when the request ends.

vLLM frees the blocks of a request that is preempted within the same call of its scheduler, and they may be
another request's in the same step. So each block that is published early has a reference of its own in vLLM's
block pool, from then on until `Released`.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, overload

from kvxferd.client import BlockList, Disconnected, Event, Publisher, PublishRefused, Released, TransferRef
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.integrations.vllm.layout.groups import CacheGroups
from kvxferd.integrations.vllm.session.request_params import (
    Request,
    has_router_ref,
    ref_from_params,
    traceparent_of,
)
from kvxferd.integrations.vllm.session.stats import ConnectorStats
from kvxferd.integrations.vllm.session.step_metadata import WrittenSpec
from kvxferd.wire.limits import MAX_NAME_CHARS

_LOG = logging.getLogger("vllm.kvxferd.scheduler")

# A reader ends its piece within milliseconds. One that is dead keeps its grant for longer: then vLLM
# preempts another request, as it does without a connector.
MAX_FREE_WAIT_S = 1.0


class _BlockIds(Sequence[int]):
    """The ids of vLLM's blocks, read as they are asked for: a step adds few of a prompt's thousands.

    Its own list of the ids takes 2 ms for 65,536 blocks, in every step of their prefill.
    """

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [block.block_id for block in self._blocks[index]]
        return int(self._blocks[index].block_id)


class _Phase(Enum):
    """Of a request that is published early, until it ends."""

    EXPECTED = auto()  # not scheduled yet
    OPEN = auto()  # published, and it grows
    SPENT = auto()  # its transfer has ended before it, and the id that the router gave is used up


@dataclass(slots=True)
class _EarlyRequest:
    request: Request
    ref: TransferRef
    phase: _Phase = _Phase.EXPECTED
    num_published: int = 0  # tokens whose blocks are published
    why: Code | None = None  # how its transfer ended, where others ended it


@dataclass(slots=True)
class _Transfer:
    """A transfer that is not released."""

    request_id: str
    has_ended: bool  # vLLM keeps the request's blocks until it is reported as sent
    kept: list[int] = field(default_factory=list)  # blocks that have a reference of the connector's
    withdrawn_at: float | None = None


class Publishing:
    """The published transfers of an engine. It is used by one thread, and never waits."""

    def __init__(
        self,
        groups: CacheGroups,
        stats: ConnectorStats,
        num_readers: int = 1,
        lease_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.publisher: Publisher | None = None
        self.cache: Any = None  # vLLM's `KVCacheManager`, without which no request is published early
        self._groups = groups
        self._stats = stats
        self._num_readers = num_readers
        self._lease_s = lease_s
        self._clock = clock
        self._sequence = itertools.count(1)
        self._early: dict[str, _EarlyRequest] = {}  # by request id
        self._transfers: dict[str, _Transfer] = {}  # by transfer id

    def expect(self, request: Request) -> None:
        """Publish a request early, if its router has asked the decode engine too, and there is any gain."""
        ref = self._router_ref(request)
        if ref is not None and self.cache is not None and self._groups.can_be_read_early:
            self._early[request.request_id] = _EarlyRequest(request, ref)

    def advance(self, scheduled: Collection[str], preempted: Collection[str]) -> list[WrittenSpec]:
        """Handle a step that vLLM has scheduled; return what its workers report when it begins.

        `scheduled` and `preempted` are request ids. `num_computed_tokens` of a request does not have the
        step's own tokens yet.
        """
        if not self._early:
            return []
        for early in [self._early[one] for one in preempted if one in self._early]:
            self._withdraw(early)
        written = []
        for early in [one for request_id, one in self._early.items() if request_id in scheduled]:
            if early.phase is _Phase.EXPECTED:
                self._open(early)
            elif early.phase is _Phase.OPEN and (spec := self._extend(early)) is not None:
                written.append(spec)
        return written

    def end(
        self, request: Request, block_ids: Sequence[Sequence[int]], *, is_computed: bool
    ) -> TransferRef | None:
        """Handle the end of a request; return the reference of its transfer, if it is published.

        `is_computed`: whether all of its prompt is; else its transfer is taken back.
        """
        early = self._early.pop(request.request_id, None)
        if early is not None:
            if early.phase is _Phase.EXPECTED and not is_computed:
                self._open(early)  # and withdrawn below: who waits for it receives that
            if early.phase is _Phase.OPEN:
                if is_computed and self._publish_last(early, block_ids):
                    return early.ref
                self._withdraw(early)
        if not is_computed or (early is not None and early.why in (Code.ABANDONED, Code.COMPLETED)):
            return None  # nobody would read it under another id
        given = None
        if early is None or early.phase is not _Phase.SPENT:
            given = self._router_ref(request)
        return self._publish(request, block_ids, given)

    def handle_events(self) -> list[str]:
        """Handle what has come from the daemon; return the requests whose blocks nobody reads any more."""
        if self.publisher is None:
            return []
        return [request for event in self.publisher.poll() for request in self._handle(event)]

    def has_pending_frees(self) -> bool:
        """Whether blocks come free by themselves, so that vLLM need not preempt another request for them.

        vLLM asks while it looks for blocks: what it has preempted in the same call is taken back here.
        """
        for early in [e for e in self._early.values() if e.request.status.name == "PREEMPTED"]:
            self._withdraw(early)
        now = self._clock()
        return any(
            one.kept and one.withdrawn_at is not None and now < one.withdrawn_at + MAX_FREE_WAIT_S
            for one in self._transfers.values()
        )

    def close(self) -> None:
        """Close the publisher, which releases what is published."""
        if self.publisher is not None:
            self.publisher.close()

    def _handle(self, event: Event) -> list[str]:
        match event:
            case Released(transfer_id=released, why=why):
                if why is not Code.COMPLETED and why is not Code.ABANDONED:
                    self._stats.record_unread_release(why)
                    _LOG.info("transfer %s was released without being read: %s", released, why)
                return self._release(released, why)
            case PublishRefused(transfer_id=refused, code=code, message=message):
                _LOG.warning("%s (%s)", message, code)
                self._stats.record_failed_publish(code)
                return self._release(refused)
            case Disconnected(code=code, message=message):
                _LOG.error("nothing can be published any more: %s (%s); restart the engine", message, code)
                return [request for one in list(self._transfers) for request in self._release(one)]
        return []

    def _release(self, transfer_id: str, why: Code | None = None) -> list[str]:
        """Handle the end of a transfer. Return its request, if that has ended."""
        transfer = self._transfers.pop(transfer_id, None)
        if transfer is None:
            return []
        early = self._early.get(transfer.request_id)
        if early is not None and early.phase is _Phase.OPEN:
            early.phase, early.why = _Phase.SPENT, why
        if transfer.kept and self.cache is not None:
            pool = self.cache.block_pool
            # vLLM frees a request's last blocks first, so that the beginnings of prompts stay cached.
            pool.free_blocks([pool.blocks[block] for block in reversed(transfer.kept)])
        return [transfer.request_id] if transfer.has_ended else []

    def _router_ref(self, request: Request) -> TransferRef | None:
        """Return the reference by which the router has asked the decode engine already.

        None where there is none, or it is of another start of this engine.
        """
        if not has_router_ref(request):
            return None
        try:
            given = ref_from_params(request.kv_transfer_params or {})
        except EngineError as error:
            _LOG.warning("request %s gets another reference: %s", request.request_id, error.message)
            return None
        if self.publisher is None:
            return None
        if given.generation != self.publisher.generation:
            _LOG.warning("request %s gets another reference: the router's is of generation %s of the engine",
                         request.request_id, given.generation)  # fmt: skip
            return None
        return given

    def _publish(
        self, request: Request, block_ids: Sequence[Sequence[int]], given: TransferRef | None
    ) -> TransferRef | None:
        """Publish a request that has ended; `given` has the id and nonce that its router chose, if it did."""
        try:
            if self.publisher is None:
                raise KvxferdError("this engine is not known to the daemon yet", Code.ENGINE_UNKNOWN)
            if not self.publisher.is_connected:
                # The client would publish it to the next daemon; until then the reader would wait in vain.
                raise KvxferdError("the daemon is away", Code.DAEMON_LOST)
            num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            name = f"{request.request_id[: MAX_NAME_CHARS - 20]}~{next(self._sequence):x}"
            if given is not None:
                name = given.transfer_id
            if self._groups.has_state and request.num_computed_tokens > num_tokens:
                raise EngineError(
                    f"cannot publish {name}: its state has gone {request.num_computed_tokens - num_tokens} "
                    "tokens beyond its prompt; ask the prefill engine for max_tokens = 1",
                    Code.BLOCKS_INVALID,
                )
            blocks = self._groups.select_blocks(block_ids, num_tokens)
            nonce = None if given is None else given.nonce
            ref = self._send(self.publisher, request, name, blocks, num_tokens, nonce)
        except KvxferdError as error:
            _LOG.warning("request %s is not published, its reader will have to compute it: %s",
                         request.request_id, error.message)  # fmt: skip
            self._stats.record_failed_publish(error.code)
            return None
        self._transfers[name] = _Transfer(request.request_id, has_ended=True)
        return ref

    def _send(
        self,
        publisher: Publisher,
        request: Request,
        name: str,
        blocks: Mapping[str, BlockList],
        num_tokens: int,
        nonce: str | None,
        ready_tokens: int | None = None,
    ) -> TransferRef:
        return publisher.publish(
            name,
            blocks,
            num_tokens,
            num_readers=self._num_readers,
            lease_s=self._lease_s,
            traceparent=traceparent_of(request),
            ready_tokens=ready_tokens,
            nonce=nonce,
        )

    # --- requests that are published early

    def _open(self, early: _EarlyRequest) -> None:
        """Publish a request of which nothing is computed. Where that fails, it is published when it ends."""
        request, ref, publisher = early.request, early.ref, self.publisher
        try:
            if publisher is None or not publisher.is_connected or ref.generation != publisher.generation:
                raise KvxferdError("the daemon is away, or has another start of the engine", Code.DAEMON_LOST)
            name, num_tokens = ref.transfer_id, request.num_prompt_tokens
            early.ref = self._send(publisher, request, name, {}, num_tokens, ref.nonce, ready_tokens=0)
        except KvxferdError as error:
            _LOG.warning("request %s is published when it ends: %s", request.request_id, error.message)
            self._early.pop(request.request_id, None)
            return
        early.phase = _Phase.OPEN
        self._transfers[ref.transfer_id] = _Transfer(request.request_id, has_ended=False)

    def _extend(self, early: _EarlyRequest) -> WrittenSpec | None:
        """Publish the blocks that the steps before this one have filled."""
        request = early.request
        # The end is reported when the request ends. A block that is partly filled is written again.
        computed = min(request.num_computed_tokens, request.num_prompt_tokens - 1)
        num_tokens = self._groups.whole_blocks_tokens(computed)
        if num_tokens == early.num_published:
            return None
        block_ids = [_BlockIds(blocks) for blocks in self.cache.get_blocks(request.request_id).blocks]
        # Fewer than before: a load of its beginning has failed, and it is computed again.
        if num_tokens < early.num_published or not self._add_blocks(early, block_ids, num_tokens):
            self._withdraw(early)
            return None
        return WrittenSpec(str(early.ref.transfer_id), num_tokens)

    def _publish_last(self, early: _EarlyRequest, block_ids: Sequence[Sequence[int]]) -> bool:
        """Publish the rest of a request that has ended; return whether that worked."""
        request = early.request
        if request.num_computed_tokens < request.num_prompt_tokens:
            return False
        if not self._add_blocks(early, block_ids, request.num_prompt_tokens):
            return False
        self._transfers[early.ref.transfer_id].has_ended = True
        return True

    def _add_blocks(self, early: _EarlyRequest, block_ids: Sequence[Sequence[int]], num_tokens: int) -> bool:
        """Publish the blocks up to `num_tokens` that are not published yet; return whether that worked."""
        assert self.publisher is not None
        transfer_id = early.ref.transfer_id
        try:
            added = self._groups.select_blocks(block_ids, num_tokens, early.num_published)
            self.publisher.add_blocks(transfer_id, added)
        except KvxferdError as error:
            _LOG.warning("request %s cannot be read before it ends: %s",
                         early.request.request_id, error.message)  # fmt: skip
            return False
        pool = self.cache.block_pool
        listed = [int(block) for one in added.values() for block in one.ids]  # type: ignore[union-attr]
        pool.touch([pool.blocks[block] for block in listed])
        self._transfers[transfer_id].kept += listed
        early.num_published = num_tokens
        return True

    def _withdraw(self, early: _EarlyRequest) -> None:
        """Take a request's transfer back: its blocks are kept until it is released."""
        if early.phase is _Phase.EXPECTED:
            self._early.pop(early.request.request_id, None)
        if early.phase is not _Phase.OPEN:
            return
        early.phase = _Phase.SPENT
        self._transfers[early.ref.transfer_id].withdrawn_at = self._clock()
        try:
            assert self.publisher is not None
            self.publisher.unpublish(early.ref)
        except KvxferdError as error:  # the session is over, and with it the transfer
            _LOG.warning("%s", error.message)
            self._release(early.ref.transfer_id)
