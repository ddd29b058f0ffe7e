"""A session's published transfers, from `publish` to `Released`, as data. No I/O except fence words.

A connected daemon decides when a transfer is over. Without one the client decides: it overwrites the
fence word first, so that no reader can take what it read for the published bytes.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvxferd.client.events import Emit
from kvxferd.client.fence_slots import FenceSlots
from kvxferd.errors import Code, EngineError
from kvxferd.ids import Incarnation, TransferId
from kvxferd.layout import BlocksByGroup, append_ids, freeze_ids
from kvxferd.memory import FencePage
from kvxferd.wire import worker
from kvxferd.wire.common import RankIncarnations
from kvxferd.wire.limits import FENCE_SLOTS

# A restarted daemon may receive a scheduler's replay before any of the engine's ranks is back.
RETRIED_ON_REPLAY = frozenset({Code.ENGINE_INCOMPLETE, Code.ENGINE_UNKNOWN})
REPUBLISH_S = 0.25

# A rank sends `Ready` for transfers of other sessions too; a few sessions' worth are kept.
MAX_READY_RECORDS = 8 * FENCE_SLOTS
# A `ready` is repeated for a default lease, 30 s: at 500 transfers a second those are 15,000 ids, some 2 MB.
MAX_USED_IDS = 16_384


@dataclass(slots=True)
class ClientPublish:
    """One transfer that is not released."""

    transfer_id: TransferId
    nonce: str
    slot: int
    blocks: BlocksByGroup
    num_tokens: int
    num_readers: int
    expires_at: float  # of its lease, as long as no reader has renewed it
    incarnations: RankIncarnations  # as the session knew them when `publish` was called
    withdrawn: bool = False  # Unpublish is sent; the daemon owes a Released
    replayed: bool = False  # an earlier daemon had it
    awaits_gpu: bool = False  # its blocks are being written: no daemon has received it
    traceparent: str = ""  # of the request's trace; "": none
    lease_s: float = 0.0  # by which an extension renews the lease
    ready_tokens: int = -1  # how far this session has written it; -1: all
    sent_epoch: int = 0  # the connection on which the publish was sent; 0: none yet


class _ReadyRecord(NamedTuple):
    """When this rank sent `Ready` for a transfer, and of which memory."""

    at: float
    incarnation: Incarnation  # of the memory that was written
    ready_tokens: int  # so many tokens; -1: all


class ClientPublishes:
    """Every transfer of a session that is not released, and others that it sent `Ready` for."""

    def __init__(
        self, fence: FenceSlots, emit: Emit, random_bytes: Callable[[int], bytes] = os.urandom
    ) -> None:
        """`random_bytes` returns so many bytes that nobody can predict."""
        self._random_bytes = random_bytes
        self._fence = fence
        self._emit = emit
        self._live: dict[TransferId, ClientPublish] = {}
        self._ready: OrderedDict[TransferId, _ReadyRecord] = OrderedDict()
        self._used_ids: OrderedDict[TransferId, None] = OrderedDict()  # the latest ids that are used up
        self._retry_at: dict[TransferId, float] = {}  # refused for now: when to send it again

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, transfer_id: TransferId) -> bool:
        return transfer_id in self._live

    def add(
        self,
        transfer_id: TransferId,
        blocks: BlocksByGroup,
        num_tokens: int,
        num_readers: int,
        expires_at: float,
        incarnations: RankIncarnations,
        nonce: str = "",
    ) -> ClientPublish:
        """Add a transfer and write its fence word. Raises EngineError(transfer-exists), BusyError.

        `nonce`: that the router has chosen; "": a new one.
        """
        if transfer_id in self._live:
            raise EngineError(
                f"cannot publish {transfer_id}: an earlier transfer of that id is not released yet",
                Code.TRANSFER_EXISTS,
            )
        if transfer_id in self._used_ids:
            # A rank's `ready` for the earlier one, which its client may repeat, would count for this one.
            raise EngineError(
                f"cannot publish {transfer_id}: an earlier transfer of that id has ended; a transfer id is "
                "used once in a generation, so choose another",
                Code.TRANSFER_EXISTS,
            )
        slot = self._fence.acquire(f"publish {transfer_id}")
        nonce = nonce or self._random_bytes(16).hex()
        publish = ClientPublish(
            transfer_id, nonce, slot, blocks, num_tokens, num_readers, expires_at, incarnations
        )
        self._live[transfer_id] = publish
        return publish

    def get(self, transfer_id: TransferId) -> ClientPublish | None:
        """Return a transfer of this session that is not released."""
        return self._live.get(transfer_id)

    def build_message(self, publish: ClientPublish, epoch: int, now: float) -> worker.Publish | None:
        """Return the message to send, with the remaining lease; None if the transfer is over."""
        if self._live.get(publish.transfer_id) is not publish:
            return None
        if now >= publish.expires_at:
            self.release_locally(publish.transfer_id, Code.LEASE_EXPIRED)
            return None
        publish.sent_epoch = epoch
        return worker.Publish(
            transfer_id=publish.transfer_id,
            nonce=publish.nonce,
            # What is sent without the lock must not grow meanwhile.
            blocks={name: freeze_ids(listed) for name, listed in publish.blocks.items()},
            num_tokens=publish.num_tokens,
            fence_slot=publish.slot,
            num_readers=publish.num_readers,
            lease_s=publish.expires_at - now,
            incarnations=publish.incarnations,
            traceparent=publish.traceparent,
            ready_tokens=publish.ready_tokens,
        )

    def add_blocks(self, publish: ClientPublish, blocks: BlocksByGroup, now: float) -> None:
        """Append blocks to a transfer that grows, and renew its lease."""
        for name, added in blocks.items():
            before = publish.blocks.get(name)
            if before is None or not before.ids or added.state_at >= 0:
                publish.blocks = {**publish.blocks, name: added}
            else:
                publish.blocks = {**publish.blocks, name: append_ids(before, added.ids)}
        publish.expires_at = max(publish.expires_at, now + publish.lease_s)

    def gpu_done(self, publish: ClientPublish) -> bool:
        """Record that the blocks are written, or never will be. Return whether the transfer is still live."""
        publish.awaits_gpu = False
        return self._live.get(publish.transfer_id) is publish

    def gpu_failed(self, publish: ClientPublish, why: str) -> None:
        """Refuse a transfer whose blocks will never be written; no daemon has received it."""
        if self.gpu_done(publish):
            self._forget(publish.transfer_id)
            message = f"cannot publish {publish.transfer_id}: {why}"
            self._emit(worker.PublishRefused(publish.transfer_id, Code.DEVICE_ERROR, message))

    def withdraw(self, transfer_id: TransferId) -> bool:
        """Mark a transfer as withdrawn by the engine. Return whether `Unpublish` must be sent."""
        held = (publish := self._live.get(transfer_id)) is not None and publish.awaits_gpu
        if held or transfer_id in self._retry_at:
            self.release_locally(transfer_id, Code.UNPUBLISHED)
        if publish := self._live.get(transfer_id):
            publish.withdrawn = True
        return publish is not None

    def connection_lost(self) -> None:
        """Release what was withdrawn, because the daemon is gone; the rest waits for the next daemon."""
        self._retry_at.clear()
        for transfer_id in [t for t, p in self._live.items() if p.withdrawn]:
            self.release_locally(transfer_id, Code.UNPUBLISHED)

    def remember_ready(
        self, transfer_id: TransferId, now: float, incarnation: Incarnation, ready_tokens: int = -1
    ) -> None:
        """Record a `ready`, to send it again to the next daemon."""
        before = self._ready.get(transfer_id)
        if before is not None and before.incarnation == incarnation:
            # An event that is noticed late takes nothing back.
            is_further = before.ready_tokens < 0 or before.ready_tokens > ready_tokens >= 0
            ready_tokens = before.ready_tokens if is_further else ready_tokens
        self._ready[transfer_id] = _ReadyRecord(now, incarnation, ready_tokens)
        self._ready.move_to_end(transfer_id)
        if len(self._ready) > MAX_READY_RECORDS:
            self._ready.popitem(last=False)

    def switch_fence_page(self, page: FencePage) -> None:
        """Move the words to the page that the new daemon reads, before anything is sent.

        A transfer that an earlier daemon released is over here too. That daemon overwrote the word before
        it sent any Released, and may have ended after the one to a rank, which reuses the blocks, and
        before the one to this session.
        """
        for transfer_id in [t for t, p in self._live.items() if self._fence.is_overwritten(p.slot)]:
            self.release_locally(transfer_id, Code.RELEASED)
        self._fence.switch_page(page)

    def replay(self, now: float, lease_s: float) -> list[ClientPublish | worker.Ready]:
        """Return the transfers to publish again, and behind them each `Ready` that no publish carries.

        A `ready` for what is not published here is not sent again once a default lease has passed: that
        transfer may be over, and its id in use for blocks that are not written yet.
        """
        for transfer_id in [t for t, p in self._live.items() if now >= p.expires_at]:
            self.release_locally(transfer_id, Code.LEASE_EXPIRED)
        for publish in self._live.values():
            publish.replayed = True
        ended = [t for t, one in self._ready.items() if t not in self._live and now >= one.at + lease_s]
        for transfer_id in ended:
            del self._ready[transfer_id]
        reports = [
            worker.Ready(transfer_id=t, incarnation=record.incarnation, ready_tokens=record.ready_tokens)
            for t, record in self._ready.items()
        ]
        return [*(publish for publish in self._live.values() if not publish.awaits_gpu), *reports]

    def handle_released(self, message: worker.Released) -> None:
        """Handle the daemon's Released, also of a transfer that another session of this engine published."""
        self._finish(message.transfer_id)
        self._emit(message)

    def handle_refused(self, message: worker.PublishRefused, now: float) -> None:
        """Handle the daemon's PublishRefused. One for a transfer that is over already changes nothing."""
        publish = self._live.get(message.transfer_id)
        if publish is None:
            return
        if publish.replayed and not publish.withdrawn and message.code in RETRIED_ON_REPLAY:
            self._retry_at[publish.transfer_id] = now + REPUBLISH_S
            return
        self._forget(message.transfer_id)
        self._emit(message)

    def pop_due_retries(self, now: float) -> list[ClientPublish]:
        """Return and remove the transfers to send again now."""
        due = [transfer_id for transfer_id, when in self._retry_at.items() if now >= when]
        for transfer_id in due:
            del self._retry_at[transfer_id]
        return [self._live[transfer_id] for transfer_id in due]

    def next_retry(self) -> float:
        """Return when `pop_due_retries` is due next, infinity while nothing is retried."""
        return min(self._retry_at.values(), default=math.inf)

    def release_locally(self, transfer_id: TransferId, why: Code) -> None:
        """Release a transfer without a daemon: overwrite the fence word, then emit Released."""
        if transfer_id in self._live:
            self._finish(transfer_id)
            self._emit(worker.Released(transfer_id, why))

    def release_all_locally(self, why: Code) -> None:
        """Release every transfer without a daemon."""
        for transfer_id in list(self._live):
            self.release_locally(transfer_id, why)
        self._ready.clear()

    def expire(self, now: float) -> None:
        """Without a daemon: release the transfers whose lease has expired."""
        for transfer_id in [t for t, p in self._live.items() if now >= p.expires_at]:
            self.release_locally(transfer_id, Code.LEASE_EXPIRED)

    def next_deadline(self) -> float:
        """Without a daemon: return when `expire` is due next; infinity: never."""
        return min((p.expires_at for p in self._live.values()), default=math.inf)

    def _finish(self, transfer_id: TransferId) -> None:
        """End a transfer; its id is used up."""
        if transfer_id in self._live:
            self._used_ids[transfer_id] = None
            if len(self._used_ids) > MAX_USED_IDS:
                self._used_ids.popitem(last=False)
        self._forget(transfer_id)

    def _forget(self, transfer_id: TransferId) -> None:
        self._ready.pop(transfer_id, None)
        self._retry_at.pop(transfer_id, None)
        if publish := self._live.pop(transfer_id, None):
            self._fence.release(publish.slot)
            publish.blocks = {}  # the outbox may still hold the publish, and must not keep its ids alive
