"""Transfers that a prefill engine publishes before their prompts are computed, in its scheduler.

A router that asks both engines at once gives the prefill engine the reference that it also gives the
decode engine. The transfer is published when the request's first chunk is scheduled, without blocks. With a
later step come the blocks that earlier steps have filled: the workers report them behind the work that they
launched before, so behind the forward pass that wrote them. The last blocks come when the request ends.

vLLM frees the blocks of a request that is preempted within the same call of its scheduler, and they may be
another request's in the same step. So each published block has a reference of its own in vLLM's block pool,
from then on until `Released`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

from kvxferd.client import BlockList, Publisher, TransferRef
from kvxferd.errors import Code, KvxferdError
from kvxferd.integrations.vllm.layout.groups import CacheGroups
from kvxferd.integrations.vllm.session.request_params import Request, traceparent_of
from kvxferd.integrations.vllm.session.step_metadata import ExtendSpec

_LOG = logging.getLogger("vllm.kvxferd.scheduler")

# A reader ends its piece within milliseconds. One that is dead keeps its grant for longer: then vLLM
# preempts another request, as it does without a connector.
MAX_FREE_WAIT_S = 1.0


class BlockPool(Protocol):
    """What is used of ``vllm.v1.core.block_pool.BlockPool``."""

    blocks: Sequence[Any]

    def touch(self, blocks: Sequence[Any]) -> None:
        """Add a reference to each block."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Remove a reference of each block; those without any may be given to another request."""


class CacheManager(Protocol):
    """What is used of ``vllm.v1.core.kv_cache_manager.KVCacheManager``."""

    block_pool: BlockPool

    def get_blocks(self, request_id: str) -> Any:
        """Return the request's `KVCacheBlocks`: its `blocks` are a list for each of vLLM's cache groups."""


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


@dataclass(slots=True)
class _OpenTransfer:
    request: Request
    ref: TransferRef
    num_tokens: int  # of the whole prompt
    num_published: int = 0  # tokens whose blocks are published


@dataclass(frozen=True, slots=True)
class LastPart:
    """The blocks of a request that has ended, and that the readers of its open transfer do not have yet."""

    ref: TransferRef
    blocks: Mapping[str, BlockList]
    num_tokens: int


class OpenTransfers:
    """The open transfers of an engine's scheduler. It is used by one thread."""

    def __init__(
        self, groups: CacheGroups, num_readers: int = 1, lease_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._groups = groups
        self._num_readers = num_readers
        self._lease_s = lease_s
        self._clock = clock
        self._cache: CacheManager | None = None
        self._expected: dict[str, tuple[Request, TransferRef]] = {}  # by request id: not scheduled yet
        self._open: dict[str, _OpenTransfer] = {}  # by request id
        # Requests whose transfer ended before they did: its id is used up. Why, where others ended it.
        self._spent: dict[str, Code | None] = {}
        self._request_ids: dict[str, str] = {}  # by transfer id, of those that are open
        self._references: dict[str, list[int]] = {}  # by transfer id: block ids, until it is released
        self._withdrawn: dict[str, float] = {}  # by transfer id: when it was taken back

    def bind(self, cache: CacheManager) -> None:
        """Take vLLM's cache manager, without which nothing is published early."""
        self._cache = cache

    @property
    def is_possible(self) -> bool:
        """Whether requests of this engine can be published early, with any gain."""
        return self._cache is not None and self._groups.can_be_read_early

    def expect(self, request: Request, ref: TransferRef) -> None:
        """Publish a request as `ref` when it is scheduled first."""
        if self.is_possible:
            self._expected[request.request_id] = (request, ref)

    def advance(
        self, publisher: Publisher | None, scheduled: Collection[str], preempted: Collection[str]
    ) -> list[ExtendSpec]:
        """Handle a step that vLLM has scheduled; return what its workers report when it begins.

        `scheduled` and `preempted` are request ids. `num_computed_tokens` of a request does not have the
        step's own tokens yet.
        """
        if not (self._open or self._expected):
            return []
        for request_id in preempted:
            self._withdraw(publisher, request_id)
        extends = []
        for request_id in [one for one in self._open if one in scheduled]:
            if (extend := self._extend(publisher, self._open[request_id])) is not None:
                extends.append(extend)
        for request_id in [one for one in self._expected if one in scheduled]:
            self._publish(publisher, *self._expected.pop(request_id))
        return extends

    def end(
        self, publisher: Publisher | None, request: Request, block_ids: Sequence[Sequence[int]] | None
    ) -> LastPart | None:
        """Forget a request that has ended; return what is left to publish of its open transfer.

        `block_ids` is None where its prompt is not computed: its transfer is taken back. Returns None then,
        and where it has no open transfer.
        """
        request_id = request.request_id
        expected = self._expected.pop(request_id, None)
        if expected is not None and block_ids is None:
            self._publish(publisher, *expected)  # and withdrawn below: who waits for it receives that
        last = None
        if block_ids is not None and (opened := self._open.get(request_id)) is not None:
            last = self._publish_last(publisher, opened, block_ids)
        if last is None:
            self._withdraw(publisher, request_id)
        else:
            del self._open[request_id]
        self._spent.pop(request_id, None)
        return last

    def is_spent(self, request: Request) -> bool:
        """Whether a request's transfer has ended before it: the id that the router gave is used up."""
        return request.request_id in self._open or request.request_id in self._spent

    def is_unwanted(self, request: Request) -> bool:
        """Whether a request's readers have ended its transfer: nobody would read it under another id."""
        return self._spent.get(request.request_id) in (Code.ABANDONED, Code.COMPLETED)

    def released(self, transfer_id: str, why: Code | None = None) -> None:
        """Handle the end of a transfer: nobody reads its blocks any more."""
        self._withdrawn.pop(transfer_id, None)
        request_id = self._request_ids.pop(transfer_id, None)
        if request_id is not None and self._open.pop(request_id, None) is not None:
            self._spent[request_id] = why
        if (block_ids := self._references.pop(transfer_id, None)) and self._cache is not None:
            pool = self._cache.block_pool
            # vLLM frees a request's last blocks first, so that the beginnings of prompts stay cached.
            pool.free_blocks([pool.blocks[block] for block in reversed(block_ids)])

    def released_all(self) -> None:
        """Handle the end of the session: every transfer is over."""
        for transfer_id in [*self._references, *self._request_ids]:
            self.released(transfer_id)

    def has_pending_frees(self, publisher: Publisher | None) -> bool:
        """Whether blocks come free by themselves, so that vLLM need not preempt another request for them.

        vLLM asks while it looks for blocks: what it has preempted in the same call is taken back here.
        """
        for request_id in [r for r, one in self._open.items() if one.request.status.name == "PREEMPTED"]:
            self._withdraw(publisher, request_id)
        now = self._clock()
        return any(
            now < since + MAX_FREE_WAIT_S and self._references.get(transfer_id)
            for transfer_id, since in self._withdrawn.items()
        )

    def _publish(self, publisher: Publisher | None, request: Request, ref: TransferRef) -> None:
        if publisher is None or not publisher.is_connected or ref.generation != publisher.generation:
            return  # it is published when it ends, or not at all
        num_tokens = request.num_prompt_tokens
        try:
            published = publisher.publish(
                ref.transfer_id,
                {},
                num_tokens,
                num_readers=self._num_readers,
                lease_s=self._lease_s,
                traceparent=traceparent_of(request),
                ready_tokens=0,
                nonce=ref.nonce,
            )
        except KvxferdError as error:
            _LOG.warning("request %s is published when it ends: %s", request.request_id, error.message)
            return
        self._open[request.request_id] = _OpenTransfer(request, published, num_tokens)
        self._request_ids[published.transfer_id] = request.request_id
        self._references[published.transfer_id] = []

    def _extend(self, publisher: Publisher | None, opened: _OpenTransfer) -> ExtendSpec | None:
        """Publish the blocks that the steps before this one have filled."""
        assert self._cache is not None
        # The end is reported when the request ends. A block that is partly filled is written again.
        computed = min(opened.request.num_computed_tokens, opened.num_tokens - 1)
        num_tokens = self._groups.whole_blocks_tokens(computed)
        request_id = opened.request.request_id
        if num_tokens < opened.num_published:  # a load of its beginning has failed: it is computed again
            self._withdraw(publisher, request_id)
            return None
        if num_tokens == opened.num_published or publisher is None:
            return None
        block_ids = [_BlockIds(blocks) for blocks in self._cache.get_blocks(request_id).blocks]
        if not self._add_blocks(publisher, opened, block_ids, num_tokens):
            self._withdraw(publisher, request_id)
            return None
        return ExtendSpec(str(opened.ref.transfer_id), num_tokens)

    def _publish_last(
        self, publisher: Publisher | None, opened: _OpenTransfer, block_ids: Sequence[Sequence[int]]
    ) -> LastPart | None:
        request = opened.request
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if publisher is None or num_tokens != opened.num_tokens:
            return None
        if not self._add_blocks(publisher, opened, block_ids, num_tokens):
            return None
        return LastPart(opened.ref, self._groups.select_blocks(block_ids, num_tokens), num_tokens)

    def _add_blocks(
        self, publisher: Publisher, opened: _OpenTransfer, block_ids: Sequence[Sequence[int]], num_tokens: int
    ) -> bool:
        """Publish the blocks up to `num_tokens` that are not published yet; return whether that worked."""
        assert self._cache is not None
        transfer_id = str(opened.ref.transfer_id)
        try:
            added = self._groups.select_blocks(block_ids, num_tokens, opened.num_published)
            publisher.add_blocks(transfer_id, added)
        except KvxferdError as error:
            _LOG.warning("request %s cannot be read before it ends: %s",
                         opened.request.request_id, error.message)  # fmt: skip
            return False
        pool = self._cache.block_pool
        listed = [int(block) for one in added.values() for block in one.ids]  # type: ignore[union-attr]
        pool.touch([pool.blocks[block] for block in listed])
        self._references[transfer_id] += listed
        opened.num_published = num_tokens
        return True

    def _withdraw(self, publisher: Publisher | None, request_id: str) -> None:
        """Take a request's transfer back: its blocks are kept until it is released."""
        self._expected.pop(request_id, None)
        if (opened := self._open.pop(request_id, None)) is None:
            return
        self._spent[request_id] = None
        self._withdrawn[str(opened.ref.transfer_id)] = self._clock()
        try:
            if publisher is not None:
                publisher.unpublish(opened.ref)
        except KvxferdError as error:  # the session is over, and with it the transfer
            _LOG.warning("%s", error.message)
            self.released(str(opened.ref.transfer_id))
