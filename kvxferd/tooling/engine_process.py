"""One rank of an engine without a model: it uses `kvxferd.client` as an engine would."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvxferd import client
from kvxferd.errors import Code, KvxferdError
from kvxferd.fd_wait import wait_readable
from kvxferd.ids import RegionId
from kvxferd.layout import EngineSpec, GroupKind, RankLayout
from kvxferd.memory import SealedMemory
from kvxferd.tooling import content
from kvxferd.tooling.content import Bytes, ContentCheck, RequestBlocks
from kvxferd.wire.common import RefLike

CONNECT_TIMEOUT_S = 30.0
# If there are more ranks than movers in the pool, some wait for a mover to be made.
REGISTER_TIMEOUT_S = 60.0
PULL_DEADLINE_S = 30.0
# A release follows the last reader's acknowledgement; an abandoned lease ends within this too.
RELEASE_TIMEOUT_S = 45.0


class Store(Protocol):
    """A rank's cache. `bytes` is the cache, or a copy of it that `load` and `save` bring up to date."""

    memory: Any  # what `register` takes for its region
    bytes: Bytes

    def load(self) -> None:
        """Copy the cache into `bytes`."""

    def save(self) -> None:
        """Copy `bytes` into the cache."""


class HostStore:
    """A cache in a sealed memfd."""

    def __init__(self, size_bytes: int) -> None:
        self.memory = SealedMemory.create(size_bytes, "kvxferd-engine")
        self.bytes: Bytes = np.frombuffer(self.memory.buffer, dtype=np.uint8)

    def load(self) -> None:
        """Do nothing: the cache is in `bytes`."""

    def save(self) -> None:
        """Do nothing: `bytes` is in the cache."""


class EventWaiter:
    """The events of one rank, in order; it waits as an engine does, on the rank's descriptor."""

    def __init__(self, rank: client.RankHandle) -> None:
        self._rank = rank
        self._pending: deque[client.Event] = deque()

    def next_event(self, deadline: float) -> client.Event:
        """Return the next event. Raises KvxferdError if none comes until `deadline`, or on a disconnect.

        `deadline` is of time.monotonic(), which on Linux is also the clock of time.perf_counter().
        """
        while not self._pending:
            left = deadline - time.monotonic()
            wait_readable([self._rank.fileno()], left)
            self._pending.extend(self._rank.poll())
            if not self._pending and left <= 0:
                raise KvxferdError(
                    "cannot go on: the expected event of the daemon did not come in time", Code.DEADLINE
                )
        event = self._pending.popleft()
        if isinstance(event, client.Disconnected):
            raise KvxferdError(event.message, event.code)
        return event


@dataclass(frozen=True)
class Pulled:
    """A pull that delivered."""

    elapsed_s: float  # as the engine measures it: from the call of `pull` to its event
    bytes: int
    runs: int
    wire_s: float  # of it, while bytes were read


class EngineRank:
    """A rank, its cache, and the events of its daemon; nothing works before `register`."""

    def __init__(self) -> None:
        self._closing = ExitStack()

    def register(
        self,
        worker_socket: str,
        spec: EngineSpec,
        layout: RankLayout,
        make_store: Callable[[int], Store] = HostStore,
    ) -> float:
        """Allocate the cache, connect, and register; return the seconds that the last two took.

        `make_store` takes the region's size in bytes.
        """
        self.layout = layout
        self.store = make_store(content.region_bytes(layout))
        self.fill_store()
        began = time.monotonic()
        self.client = client.connect(worker_socket, timeout_s=CONNECT_TIMEOUT_S)
        self._closing.callback(self.client.close)
        self.rank = self._register(spec)
        self.events = EventWaiter(self.rank)
        self._released: dict[str, Code] = {}
        return time.monotonic() - began

    def close(self) -> None:
        """Unregister; the daemon unmaps the memory. Then the rank may register anew."""
        self._closing.close()

    def fill_store(self) -> None:
        """Fill the cache with bytes that no request has."""
        self.store.bytes[:] = content.background(self.store.bytes.size)
        self.store.save()

    # --- as a source

    def write(self, request: RequestBlocks, start: int = 0, ends_of: int = 0) -> None:
        """Write the request's content from a token on, or the ends of every so many tokens."""
        content.write(self.store.bytes, self.layout, request, start, ends_of)
        self.store.save()

    def publish(self, name: str, request: RequestBlocks, /, **options: Any) -> client.TransferRef:
        """Publish the request's blocks, which this rank has written. `options`: of `RankHandle.publish`."""
        return self.rank.publish(name, self.block_lists(request), request.num_tokens, **options)

    def ready(self, name: str, tokens: int | None = None, request: RequestBlocks | None = None) -> None:
        """Report so many tokens as written, None: all; `request` has the blocks that are new."""
        self.rank.ready(name, tokens, None if request is None else self.block_lists(request))

    def unpublish(self, ref: client.TransferRef) -> None:
        """Withdraw a transfer; `await_release` waits."""
        self.rank.unpublish(ref)

    def await_release(self, names: Iterable[str], limit_s: float = RELEASE_TIMEOUT_S) -> Counter[str]:
        """Wait until the blocks of these transfers are released; return how many were for each reason.

        Raises KvxferdError if the daemon refuses one, or with `deadline` after `limit_s`.
        """
        wanted = set(names)
        deadline = time.monotonic() + limit_s
        while not wanted <= self._released.keys():
            match self.events.next_event(deadline):
                case client.Released(transfer_id, why):
                    self._released[transfer_id] = why
                case client.PublishRefused(_, code, message):
                    raise KvxferdError(message, code)
        return Counter(self._released.pop(name).value for name in wanted)

    # --- as a sink

    def prepare(self, ref: RefLike) -> None:
        """Announce the pull of a transfer."""
        self.rank.prepare(ref)

    def abandon(self, ref: RefLike) -> None:
        """Report that this engine will not pull a transfer."""
        self.rank.abandon(ref)

    def pull(self, ref: RefLike, request: RequestBlocks, progressive: bool = False) -> Pulled:
        """Pull a transfer into the request's blocks.

        Raises KvxferdError with the pull's code if it fails; then no write can come any more.
        """
        began = time.monotonic()
        ticket = self.rank.pull(
            ref, self.block_lists(request), request.num_tokens, PULL_DEADLINE_S, progressive=progressive
        )
        deadline = began + 2 * PULL_DEADLINE_S
        failed: client.Failed | None = None
        while True:
            match self.events.next_event(deadline):
                case client.Delivered() as end if end.ticket is ticket:
                    return Pulled(time.monotonic() - began, end.bytes, end.runs, end.wire_s)
                case client.Failed() as end if end.ticket is ticket:
                    if end.safe_to_reuse:
                        raise KvxferdError(end.message, end.code)
                    failed = end
                case client.Quiesced(quiet) if quiet is ticket and failed is not None:
                    raise KvxferdError(failed.message, failed.code)

    def check(self, request: RequestBlocks, ends_of: int = 0) -> ContentCheck:
        """Compare every byte of the request, or of the ends of every so many tokens."""
        self.store.load()
        return content.check(self.store.bytes, self.layout, request, ends_of=ends_of)

    def block_lists(self, request: RequestBlocks) -> dict[str, client.BlockList]:
        """Return the request's block ids as the client takes them."""
        kinds = {group.name: group.kind for group in self.layout.groups}
        return {
            name: client.BlockList(ids=ids.data, state_at=request.num_tokens)
            if kinds[name] is GroupKind.STATE  # type: ignore[index]
            else client.BlockList(ids=ids.data, first_token=request.first_token)
            for name, ids in request.ids.items()
        }

    def _register(self, spec: EngineSpec) -> client.RankHandle:
        (region,) = self.layout.regions
        memory = {RegionId(region.region): self.store.memory}
        return self.client.register(spec, self.layout, memory, timeout_s=REGISTER_TIMEOUT_S)
