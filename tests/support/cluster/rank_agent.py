"""A worker process: one rank, its memory, and both roles. Driven by the runner through a pipe.

It answers nothing in turn: it reports what happens, when it happens, so that a stopped or killed
worker keeps nobody waiting. What it publishes is overwritten the moment it is released.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from kvxferd import client
from kvxferd.errors import EngineError, KvxferdError
from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.memory import SealedMemory
from kvxferd.tooling import content
from tests.support.cluster.pattern_blocks import Blocks, Yard

GROUP = "full"
LOOK_S = 0.25
JUNK = 254


@dataclass(frozen=True)
class Birth:
    """What a worker is."""

    socket: str
    spec: EngineSpec
    facts: dict[str, Any]
    sabotage: str = ""
    is_scheduler: bool = False


@dataclass(frozen=True)
class Chunk:
    """Tokens [begin, end) of a transfer that grows. The first chunk opens it: its `begin` is -1."""

    name: str
    request: int
    ids: list[int]  # of all its blocks
    num_tokens: int
    begin: int
    end: int
    publishes: bool
    lease_s: float
    nonce: str | None


@dataclass
class Asked:
    """A pull that has not ended, or whose blocks are in doubt."""

    ticket: client.PullTicket
    ref: dict[str, Any]
    request: int
    ids: list[int]
    num_tokens: int
    began: float = field(default_factory=time.monotonic)


class Agent:
    """See the module. Each method but `serve` is a command of the runner."""

    def __init__(self, pipe: Connection, birth: Birth) -> None:
        self._pipe = pipe
        self._sabotage = birth.sabotage
        self._layout = attention_layout(spec=birth.spec, **birth.facts)
        region = self._layout.regions[0]
        half = birth.facts["num_blocks"] // 2
        self._pulled = range(half, 2 * half)
        self._memory = SealedMemory.create(region.size_bytes, "kvxferd-chaos")
        self._lay_out()
        self._num_sleeps = 0
        self._block_tokens = birth.facts["block_tokens"]
        self._published: dict[str, list[int]] = {}
        self._pulls: dict[int, Asked] = {}  # by the runner's number
        self._numbers: dict[int, int] = {}  # from the ticket's
        self._say("born", os.getpid(), os.fstat(self._memory.fd).st_ino)
        self._rank = self._register(birth, region.region)

    def _lay_out(self) -> None:
        self._bytes = np.frombuffer(self._memory.buffer, dtype=np.uint8)
        self._blocks = Blocks(self._bytes, self._layout)
        self._yard = Yard(self._blocks, self._pulled)

    def _say(self, *message: Any) -> None:
        self._pipe.send(message)

    def _register(self, birth: Birth, region: str) -> client.RankHandle:
        began = time.monotonic()
        while True:
            try:
                self._client = client.connect(birth.socket, name="chaos")
                try:
                    rank = self._client.register(birth.spec, self._layout, {region: self._memory})
                except KvxferdError:
                    self._client.close()
                    raise
            except KvxferdError as error:
                # An engine that cannot start is started again by whoever runs it.
                self._say("refused", str(error.code), error.message)
                time.sleep(0.1)
                continue
            self._say("registered", time.monotonic() - began)
            return rank

    def serve(self) -> None:
        looked = 0.0
        while True:
            for ready in wait([self._pipe, self._rank.fileno()], LOOK_S):
                if ready is self._pipe:
                    name, *args = self._pipe.recv()
                    getattr(self, name)(*args)
            for event in self._rank.poll():
                self._take(event)
            if time.monotonic() - looked > LOOK_S:
                looked = time.monotonic()
                self._look()

    def _look(self) -> None:
        self._yard.look()
        if self._yard.num_written:
            self._say("overwritten", self._yard.num_written)
            self._yard.num_written = 0

    # --- commands

    def write(self, name: str, request: int, ids: list[int], tokens: int, role: str, lease_s: float) -> None:
        """Write a transfer; then publish it, say ready, or leave that to the engine's scheduler."""
        held = content.RequestBlocks(request, {GROUP: np.array(ids, np.int32)}, tokens)
        content.write(self._bytes, self._layout, held)
        self._published[name] = ids
        try:
            if role == "rank":
                self._say("written", name, True)
            elif role == "publisher":
                blocks = {GROUP: client.BlockList(first_token=0, ids=held.ids[GROUP])}
                ref = self._rank.publish(name, blocks, tokens, lease_s=lease_s)
                self._say("published", name, ref.to_dict())
            else:
                self._rank.ready(name)
        except KvxferdError as error:
            self._drop(name)
            self._say("released", name, str(error.code))

    def grow(self, chunk: Chunk) -> None:
        """Write a chunk of a transfer that grows, then report it. What is not written is poison."""
        if chunk.begin < 0:
            for block in chunk.ids:
                self._blocks.fill(block, JUNK)
            self._published[chunk.name] = chunk.ids
        elif chunk.name not in self._published:
            return  # released, or the rank has slept
        held = content.RequestBlocks(chunk.request, {GROUP: np.array(chunk.ids, np.int32)}, chunk.end)
        if self._sabotage != "unwritten":
            content.write(self._bytes, self._layout, held, max(chunk.begin, 0))
        self._report(chunk)

    def _report(self, chunk: Chunk) -> None:
        ready = None if chunk.end == chunk.num_tokens else chunk.end
        had, have = (-(-max(tokens, 0) // self._block_tokens) for tokens in (chunk.begin, chunk.end))
        blocks = {GROUP: client.BlockList(first_token=0, ids=np.array(chunk.ids[had:have], np.int32))}
        try:
            if not chunk.publishes:
                self._rank.ready(chunk.name, ready)
            elif chunk.begin >= 0:
                self._rank.ready(chunk.name, ready, blocks if have > had else None)
            else:
                ref = self._rank.publish(
                    chunk.name, blocks, chunk.num_tokens, lease_s=chunk.lease_s,
                    ready_tokens=chunk.end, nonce=chunk.nonce,
                )  # fmt: skip
                self._say("published", chunk.name, ref.to_dict())
        except KvxferdError as error:
            self._say("extend refused", str(error.code))
            if chunk.begin < 0:  # nothing of it was ever reported
                self._drop(chunk.name)
                self._say("released", chunk.name, str(error.code))

    def unpublish(self, ref: dict[str, Any]) -> None:
        self._rank.unpublish(ref)

    def drop(self, name: str) -> None:
        """The engine's publisher heard that it is over."""
        self._drop(name)

    def prepare(self, ref: dict[str, Any]) -> None:
        self._rank.prepare(ref)

    def abandon(self, ref: dict[str, Any]) -> None:
        self._rank.abandon(ref)

    def pull(
        self,
        number: int,
        ref: dict[str, Any],
        request: int,
        tokens: int,
        deadline_s: float,
        is_progressive: bool,
    ) -> None:
        ids = self._yard.take(-(-tokens // self._block_tokens))
        if ids is None:
            self._say("full", number)
            return
        blocks = {GROUP: client.BlockList(first_token=0, ids=np.array(ids, np.int32))}
        try:
            ticket = self._rank.pull(ref, blocks, tokens, deadline_s, progressive=is_progressive)
        except KvxferdError as error:
            self._yard.park(ids)
            self._say("ended", number, str(error.code), 0, True, 0.0)
            return
        self._pulls[number] = Asked(ticket, ref, request, ids, tokens)
        self._numbers[ticket.number] = number

    def cancel(self, number: int) -> None:
        if number in self._pulls:
            self._pulls[number].ticket.cancel()

    def suspend(self) -> None:
        self._rank.suspend()

    def resume(self) -> None:
        region = self._layout.regions[0].region
        while True:
            try:
                self._rank.resume({region: self._memory})
            except EngineError as error:
                self._say("refused", str(error.code), error.message)  # still suspended
                time.sleep(0.1)
                continue
            self._say("registered", 0.0)
            return

    # --- events

    def _take(self, event: client.Event) -> None:
        match event:
            case client.Released() | client.PublishRefused():
                why = event.why if isinstance(event, client.Released) else event.code
                self._drop(event.transfer_id)
                self._say("released", event.transfer_id, str(why))
            case client.Delivered():
                self._delivered(self._numbers[event.ticket.number])
            case client.Failed():
                self._failed(self._numbers[event.ticket.number], event)
            case client.Quiesced():
                number = self._numbers.pop(event.ticket.number)
                self._yard.park(self._pulls.pop(number).ids)
                self._say("quiesced", number)
            case client.Suspended():
                self._sleep()
            case client.Disconnected():
                self._say("disconnected", str(event.code), event.message)

    def _sleep(self) -> None:
        """The memory is the engine's again: others use it, or it is freed and comes back elsewhere."""
        self._yard.look()
        if self._pulls:
            self._say("overwritten", len(self._pulls))  # a rank sleeps and one of its pulls may still write
        self._published.clear()
        self._bytes[:] = JUNK
        self._num_sleeps += 1
        if self._num_sleeps % 2:
            size = self._layout.regions[0].size_bytes
            former, self._memory = self._memory, SealedMemory.create(size, "kvxferd-chaos")
            self._lay_out()
            self._bytes[:] = JUNK
            former.close()
        self._yard = Yard(self._blocks, self._pulled)
        self._say("suspended", os.fstat(self._memory.fd).st_ino)

    def _drop(self, name: str) -> None:
        """Reuse the blocks at once, with other content."""
        for block in self._published.pop(name, ()):
            self._blocks.fill(block, JUNK)

    def _delivered(self, number: int) -> None:
        if self._sabotage == "hang":
            self._sabotage = ""
            return
        requested = self._pulls.pop(number)
        del self._numbers[requested.ticket.number]
        if self._sabotage == "corrupt":
            self._sabotage = ""
            self._blocks.fill(requested.ids[0], 7)
        held = content.RequestBlocks(
            requested.request, {GROUP: np.array(requested.ids, np.int32)}, requested.num_tokens
        )
        took = time.monotonic() - requested.began
        wrong = content.check(self._bytes, self._layout, held).wrong_items
        self._yard.park(requested.ids)
        if self._sabotage == "late-write":
            self._sabotage = ""
            self._yard.spoil()
        self._say("ended", number, "delivered", wrong, True, took)

    def _failed(self, number: int, event: client.Failed) -> None:
        requested = self._pulls[number]
        took = time.monotonic() - requested.began
        if event.safe_to_reuse:
            del self._pulls[number], self._numbers[event.ticket.number]
            self._yard.park(requested.ids)
        self._say("ended", number, str(event.code), 0, event.safe_to_reuse, took)
