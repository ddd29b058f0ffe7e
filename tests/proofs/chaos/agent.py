"""A worker process: one rank in both roles. Driven by the runner through a pipe.

It answers nothing in turn: it reports what happens, when it happens, so that a stopped or killed
worker keeps nobody waiting. What it publishes is overwritten the moment it is released.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxferd import client
from kvxferd.errors import Code, KvxferdError
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.layout.presets import attention_layout
from kvxferd.tooling import content
from kvxferd.tooling.content import RequestBlocks
from kvxferd.tooling.engine_process import EngineRank, HostStore
from tests.support.nodes.agent import blocks

LOOK_S = 0.25
JUNK = 254


@dataclass(frozen=True)
class Birth:
    """What a worker is."""

    socket: str
    spec: EngineSpec
    facts: dict[str, Any]
    sabotage: str = ""


@dataclass(frozen=True)
class Chunk:
    """Tokens [begin, end) of a transfer. The first chunk, which may be all of it, has -1 as its `begin`."""

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
    held: RequestBlocks
    ids: list[int]
    began: float = field(default_factory=time.monotonic)


Bytes = npt.NDArray[np.uint8]


class Blocks:
    """Each block's bytes."""

    def __init__(self, memory: Bytes, layout: RankLayout) -> None:
        self._views = list(content.block_views(memory, layout))

    def fill(self, block: int, value: int) -> None:
        for view in self._views:
            view[block] = value

    def holds(self, block: int, value: int) -> bool:
        return all(bool((view[block] == value).all()) for view in self._views)


class Yard:
    """Free blocks of a sink, longest free first. What is parked here must keep its pattern."""

    def __init__(self, blocks: Blocks, ids: range) -> None:
        self._blocks = blocks
        self._value = 0
        self._parked: deque[tuple[int, int]] = deque()
        self.num_written = 0  # blocks that somebody wrote although they were safe
        self.park(list(ids))

    def park(self, ids: list[int]) -> None:
        """These were said to be safe: from now on nobody else writes them."""
        self._value = self._value % 251 + 1
        for block in ids:
            self._blocks.fill(block, self._value)
            self._parked.append((block, self._value))

    def take(self, count: int) -> list[int] | None:
        """Return that many blocks, None if there are not so many."""
        if len(self._parked) < count:
            return None
        taken = [self._parked.popleft() for _ in range(count)]
        self._look(taken)
        return [block for block, _ in taken]

    def look(self) -> None:
        """Count what has been written since."""
        self._look(list(self._parked))

    def _look(self, parked: list[tuple[int, int]]) -> None:
        for block, value in parked:
            if not self._blocks.holds(block, value):
                self.num_written += 1
                self._blocks.fill(block, value)

    def spoil(self) -> None:
        """Write a parked block: to show that it is noticed."""
        self._blocks.fill(self._parked[-1][0], 255)


class Agent(EngineRank):
    """A rank, its memory, and both roles. The runner's commands are methods."""

    def __init__(self, pipe: Connection, birth: Birth) -> None:
        super().__init__()
        self._pipe = pipe
        self._sabotage = birth.sabotage
        self.layout = attention_layout(spec=birth.spec, **birth.facts)
        self.store = HostStore(content.region_bytes(self.layout))
        half = birth.facts["num_blocks"] // 2
        self._blocks = Blocks(self.store.bytes, self.layout)
        self._yard = Yard(self._blocks, range(half, 2 * half))
        self._looked = 0.0
        self._block_tokens = birth.facts["block_tokens"]
        self._published: dict[str, list[int]] = {}
        self._pulls: dict[int, Asked] = {}  # by the runner's number
        self._numbers: dict[int, int] = {}  # from the ticket's
        self._say("born", os.getpid(), os.fstat(self.store.memory.fd).st_ino)
        self._insist(birth)

    def _insist(self, birth: Birth) -> None:
        """Register as soon as the daemon lets it: who cannot start is started again by whoever runs it."""
        began = time.monotonic()
        while not hasattr(self, "rank"):
            try:
                self.client = client.connect(birth.socket, name="chaos")
                try:
                    self.rank = self._register(birth.spec)
                except KvxferdError:
                    self.client.close()
                    raise
            except KvxferdError as error:
                self._say("refused", str(error.code), error.message)
                time.sleep(0.1)
        self._say("registered", time.monotonic() - began)

    def serve(self) -> None:
        """Obey commands and take events until the runner is gone."""
        while True:
            for ready in wait([self._pipe, self.rank.fileno()], LOOK_S):
                if ready is self._pipe:
                    name, *args = self._pipe.recv()
                    getattr(self, name)(*args)
            for event in self.rank.poll():
                self._take(event)
            self._look()

    def _say(self, *message: Any) -> None:
        self._pipe.send(message)

    def _look(self) -> None:
        if time.monotonic() < self._looked + LOOK_S:
            return
        self._looked = time.monotonic()
        self._yard.look()
        if self._yard.num_written:
            self._say("overwritten", self._yard.num_written)
            self._yard.num_written = 0

    # --- commands, beside those of an `EngineRank`

    def grow(self, chunk: Chunk) -> None:
        """Write a chunk of a transfer, then publish or report it. What is not written is poison."""
        if chunk.begin < 0:
            for block in chunk.ids:
                self._blocks.fill(block, JUNK)
            self._published[chunk.name] = chunk.ids
        elif chunk.name not in self._published:
            return  # released
        is_whole = chunk.begin < 0 and chunk.end == chunk.num_tokens
        if self._sabotage != "unwritten" or is_whole:
            self.write(blocks(chunk.ids, chunk.end, chunk.request), max(chunk.begin, 0))
        self._report(chunk)

    def _report(self, chunk: Chunk) -> None:
        ready = None if chunk.end == chunk.num_tokens else chunk.end
        had, have = (-(-max(tokens, 0) // self._block_tokens) for tokens in (chunk.begin, chunk.end))
        new = blocks(chunk.ids[had:have], chunk.num_tokens, chunk.request)
        try:
            if not chunk.publishes:
                self.ready(chunk.name, ready)
            elif chunk.begin >= 0:
                self.ready(chunk.name, ready, new if have > had else None)
            else:
                ref = self.publish(
                    chunk.name, new, lease_s=chunk.lease_s, ready_tokens=ready, nonce=chunk.nonce
                )
                self._say("published", chunk.name, ref.to_dict())
        except KvxferdError as error:
            self._say("extend refused", str(error.code))
            if chunk.begin < 0:  # nothing of it was ever reported
                self._end_of(chunk.name, error.code)

    def start_pull(
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
        held = blocks(ids, tokens, request)
        try:
            ticket = self.rank.pull(
                ref, self.block_lists(held), tokens, deadline_s, progressive=is_progressive
            )
        except KvxferdError as error:
            self._yard.park(ids)
            self._say("ended", number, str(error.code), 0, True, 0.0)
            return
        self._pulls[number] = Asked(ticket, held, ids)
        self._numbers[ticket.number] = number

    def cancel(self, number: int) -> None:
        if number in self._pulls:
            self._pulls[number].ticket.cancel()

    # --- events

    def _take(self, event: client.Event) -> None:
        match event:
            case client.Released():
                self._end_of(event.transfer_id, event.why)
            case client.PublishRefused():
                self._end_of(event.transfer_id, event.code)
            case client.Delivered():
                self._delivered(self._numbers[event.ticket.number])
            case client.Failed():
                self._failed(self._numbers[event.ticket.number], event)
            case client.Quiesced():
                number = self._numbers.pop(event.ticket.number)
                self._yard.park(self._pulls.pop(number).ids)
                self._say("quiesced", number)
            case client.Disconnected():
                self._say("disconnected", str(event.code), event.message)

    def _end_of(self, name: str, code: Code) -> None:
        self.drop(name)
        self._say("released", name, str(code))

    def drop(self, name: str) -> None:
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
        took = time.monotonic() - requested.began
        wrong = self.check(requested.held).wrong_items
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


def run(pipe: Connection, birth: Birth) -> None:
    """A worker process's main function; ends when the runner is gone."""
    try:
        Agent(pipe, birth).serve()
    except (EOFError, ConnectionError):
        os._exit(0)
