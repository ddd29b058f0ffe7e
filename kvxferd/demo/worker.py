"""One worker process of the demo: a rank of an engine, without a model.

It uses `kvxferd.client` as an engine would. `python -m kvxferd.demo.worker` handles commands from
standard input until it is closed.
"""

from __future__ import annotations

import time
from typing import assert_never

import numpy as np

from kvxferd import client
from kvxferd.demo import content, protocol
from kvxferd.demo.shape import GROUP, DemoShape, Role
from kvxferd.errors import KvxferdError
from kvxferd.ids import Rank, RegionId
from kvxferd.memory import SealedMemory
from kvxferd.tooling.command_loop import serve_commands
from kvxferd.tooling.event_waiter import EventWaiter

CONNECT_TIMEOUT_S = 30.0
# If there are more ranks than movers in the pool, some wait for a mover to be made.
REGISTER_TIMEOUT_S = 60.0
PULL_DEADLINE_S = 30.0
# A release follows the last reader's acknowledgement; an abandoned lease ends within this too.
RELEASE_TIMEOUT_S = 45.0


class DemoWorker:
    """A registered rank, its memory, and the events of its daemon."""

    def __init__(self, begin: protocol.StartRank) -> None:
        self._shape: DemoShape = begin.shape
        self._role: Role = begin.role
        self._layout = begin.shape.rank_layout(begin.role, Rank(*begin.rank))
        self._memory = SealedMemory.create(content.region_bytes(self._layout), "kvxferd-demo")
        self._bytes = np.frombuffer(self._memory.buffer, dtype=np.uint8)
        if begin.role == "decode":
            self._bytes[:] = content.background(self._bytes.size)
        self._client = client.connect(begin.worker_socket, timeout_s=CONNECT_TIMEOUT_S)
        (region,) = self._layout.regions
        self._rank = self._client.register(
            engine=begin.shape.spec(begin.role, Rank(*begin.rank)),
            layout=self._layout,
            regions={RegionId(region.region): self._memory},
            timeout_s=REGISTER_TIMEOUT_S,
        )
        self._published: dict[int, client.TransferRef] = {}
        self._events = EventWaiter(self._rank)

    def close(self) -> None:
        """Unregister; the daemon unmaps the memory."""
        self._client.close()

    def prefill(self, command: protocol.PrefillCommand) -> protocol.Prefilled:
        """Write a request's blocks, publish it if this rank is to, and report that the rank is ready."""
        held = self._request_blocks(command.request)
        content.write(self._bytes, self._layout, held)
        name = _transfer_id(command.request)
        if not command.publish:
            self._rank.ready(name)
            return protocol.Prefilled(ref=None)
        blocks = {GROUP: client.BlockList(first_token=0, ids=held.block_ids.data)}
        ref = self._rank.publish(name, blocks=blocks, num_tokens=held.num_tokens, num_readers=1)
        self._rank.ready(name)
        self._published[command.request] = ref
        return protocol.Prefilled(ref=ref.to_dict())

    def await_release(self, command: protocol.AwaitRelease) -> protocol.BlocksFreed:
        """Wait until the request's blocks are released."""
        name = _transfer_id(command.request)
        if command.unpublish:
            self._rank.unpublish(self._published[command.request])
        deadline = time.monotonic() + RELEASE_TIMEOUT_S
        while True:
            match self._events.next_event(deadline):
                case client.Released(transfer_id, why) if transfer_id == name:
                    return protocol.BlocksFreed(why=why.value)
                case client.PublishRefused(transfer_id, code, message) if transfer_id == name:
                    raise KvxferdError(message, code)

    def pull(self, command: protocol.PullCommand) -> protocol.PullResult:
        """Pull a request into this rank's blocks, then check the whole memory."""
        held = self._request_blocks(command.request)
        before = self._bytes.copy()
        blocks = {GROUP: client.BlockList(first_token=0, ids=held.block_ids.data)}
        started = time.monotonic()
        ticket = self._rank.pull(
            command.ref, blocks=blocks, num_tokens=held.num_tokens, deadline_s=PULL_DEADLINE_S
        )
        end = self._await_outcome(ticket, started + 2 * PULL_DEADLINE_S)
        elapsed_s = time.monotonic() - started
        if isinstance(end, client.Failed) and not end.safe_to_reuse:
            self._await_quiesced(ticket)
        mask = content.block_mask(self._layout, held.block_ids)
        if command.damage:
            self._corrupt_byte(command.damage, mask)
        spilled = int(np.count_nonzero((self._bytes != before) & ~mask))
        if isinstance(end, client.Failed):
            return _failed_result(end, elapsed_s, spilled)
        found = content.check(self._bytes, self._layout, held)
        return protocol.PullResult(
            delivered=True,
            code="",
            message="",
            bytes=end.bytes,
            runs=end.runs,
            elapsed_s=elapsed_s,
            checked_items=found.checked_items,
            wrong_items=found.wrong_items,
            spilled_bytes=spilled,
            first_wrong=found.first_wrong,
        )

    def _request_blocks(self, request: int) -> content.RequestBlocks:
        return content.RequestBlocks(request, self._shape.block_ids(self._role, request), self._shape.tokens)

    def _await_outcome(self, ticket: client.PullTicket, deadline: float) -> client.Delivered | client.Failed:
        while True:
            event = self._events.next_event(deadline)
            if isinstance(event, client.Delivered | client.Failed) and event.ticket is ticket:
                return event

    def _await_quiesced(self, ticket: client.PullTicket) -> None:
        deadline = time.monotonic() + PULL_DEADLINE_S
        while True:
            event = self._events.next_event(deadline)
            if isinstance(event, client.Quiesced) and event.ticket is ticket:
                return

    def _corrupt_byte(self, what: str, mask: np.ndarray) -> None:
        """Corrupt one byte, to show that the check finds it."""
        place = int(np.argmax(mask if what == "item" else ~mask))
        self._bytes[place] ^= 0xFF


class DemoCommandHandler:
    """Handles commands, the first of which makes the process a worker."""

    def __init__(self) -> None:
        self._worker: DemoWorker | None = None

    def handle(self, command: protocol.Command) -> protocol.Reply:
        """Handle one command."""
        if isinstance(command, protocol.StartRank):
            started = time.monotonic()
            self._worker = DemoWorker(command)
            return protocol.RankStarted(register_s=time.monotonic() - started)
        if self._worker is None:
            raise KvxferdError(f"cannot handle {type(command).__name__}: this process is no rank yet")
        match command:
            case protocol.PrefillCommand():
                return self._worker.prefill(command)
            case protocol.AwaitRelease():
                return self._worker.await_release(command)
            case protocol.PullCommand():
                return self._worker.pull(command)
            case _:
                assert_never(command)

    def progress(self) -> bool:
        """Return False: there is no work between commands."""
        return False

    def close(self) -> None:
        """Unregister the rank."""
        if self._worker is not None:
            self._worker.close()


def _failed_result(end: client.Failed, elapsed_s: float, spilled: int) -> protocol.PullResult:
    return protocol.PullResult(
        delivered=False,
        code=end.code.value,
        message=end.message,
        bytes=0,
        runs=0,
        elapsed_s=elapsed_s,
        checked_items=0,
        wrong_items=0,
        spilled_bytes=spilled,
        first_wrong="",
    )


def _transfer_id(request: int) -> str:
    return f"req-{request}"


if __name__ == "__main__":
    serve_commands(protocol.PROTOCOL, DemoCommandHandler)
