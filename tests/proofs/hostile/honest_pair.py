"""Two honest engines that read from each other and check every byte, in a process of their own.

Each engine is source and sink. They go on between calls of `Pair`, and while one runs.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvxferd import client
from kvxferd.die_with_parent import die_with_parent
from kvxferd.errors import KvxferdError
from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.tooling import content
from kvxferd.tooling.content import RequestBlocks
from kvxferd.tooling.engine_process import EngineRank
from kvxferd.wire.common import TransferRef
from tests.proofs.hostile.users import ENGINES

GROUP = "full"
FACTS: dict[str, Any] = {"num_kv_heads": 4, "head_dim": 32, "block_tokens": 16, "num_blocks": 64}
NUM_LAYERS = 4
NUM_BLOCKS = 8  # of a transfer
TOKENS = NUM_BLOCKS * 16 - 3
DEADLINE_S = 20.0  # the machine may have more to do than it has cores
NEWCOMER_S = 15.0
EVERY_S = 0.1  # a transfer in each direction
STEP_S = 0.02
JUNK = 254


def spec_of(name: str, **more: Any) -> EngineSpec:
    facts: dict[str, Any] = {
        "num_layers": NUM_LAYERS,
        "num_kv_heads": FACTS["num_kv_heads"],
        "generation": "g1",
    }
    return EngineSpec(engine_id=name, **(facts | {"publish_implies_ready": True} | more))


@dataclass
class Traffic:
    """What the pair has done of itself."""

    done: int = 0
    failed: int = 0
    wrong: int = 0
    slowest_ms: float = 0.0
    why: tuple[str, ...] = ()

    def fail(self, why: str) -> None:
        self.failed += 1
        self.why = (*self.why, why[:200])[:3]


class Engine(EngineRank):
    """One rank: half of its blocks are published from, half are pulled into."""

    def __init__(self, socket: str, spec: EngineSpec) -> None:
        super().__init__()
        self.name = spec.engine_id
        try:
            self.started_in_s = self.register(socket, spec, attention_layout(spec=spec, **FACTS))
        except BaseException:
            self.close()
            raise
        half = FACTS["num_blocks"] // 2
        self.free = list(range(half))
        self.room = list(range(half, 2 * half))
        self.published: dict[str, list[int]] = {}

    def publish_new(self, name: str, request: int) -> dict[str, Any] | None:
        """Write and publish; None where blocks lack."""
        if len(self.free) < NUM_BLOCKS:
            return None
        ids, self.free = self.free[:NUM_BLOCKS], self.free[NUM_BLOCKS:]
        self.write(_held(request, ids))
        self.published[name] = ids
        try:
            return self.publish(name, _held(request, ids), lease_s=30.0).to_dict()
        except KvxferdError:
            self.reuse(name)
            return None

    def reuse(self, name: str) -> None:
        """The blocks of a transfer hold something else from now on."""
        ids = self.published.pop(name, [])
        for number in ids:
            self.write(_held(JUNK, [number], 16))
        self.free += ids

    def start_pull(self, ref: Any, ids: list[int], deadline_s: float) -> client.PullTicket:
        return self.rank.pull(ref, self.block_lists(_held(0, ids)), TOKENS, deadline_s)

    def num_wrong(self, request: int, ids: list[int]) -> int:
        return self.check(_held(request, ids)).wrong_items


def _held(request: int, ids: list[int], num_tokens: int = TOKENS) -> RequestBlocks:
    return RequestBlocks(request, {GROUP: np.array(ids, np.int32)}, num_tokens)


def _formed(ref: Any, form: str) -> Any:
    """As a dict, as JSON in text or bytes, or as the struct itself with nothing checked."""
    if form == "struct" and isinstance(ref, dict):
        return TransferRef(**ref)
    if form in ("text", "bytes"):
        text = json.dumps(ref)
        return text if form == "text" else text.encode()
    return ref


@dataclass
class Pulling:
    """A pull that has not ended, or whose blocks are in doubt."""

    request: int  # 0: what comes is not compared
    ids: list[int]
    began: float
    is_requested: bool  # by somebody who waits for its end


class Pair:
    """What an attack may have it do returns how that went, by `outcome`."""

    def __init__(self, sockets: list[str]) -> None:
        self._sockets = sockets
        _warm()
        ENGINES.become()  # who may not be able to read where all of this lies
        die_with_parent(os.getppid())  # which a change of user has taken back
        self._engines = [Engine(socket, spec_of(f"honest-{n}")) for n, socket in enumerate(sockets)]
        self._pulls: dict[tuple[int, int], Pulling] = {}  # by sink and ticket
        self._ends: dict[tuple[int, int], dict[str, Any]] = {}  # of those that were requested
        self._halves: dict[str, Engine] = {}
        self._counter = 0
        self._due = 0.0
        self._traffic = Traffic()

    def progress(self) -> bool:
        """Let the traffic go on for a moment. It has no end."""
        select.select([engine.rank for engine in self._engines], [], [], STEP_S)
        for number, engine in enumerate(self._engines):
            for event in engine.rank.poll():
                self._take(number, engine, event)
        if time.monotonic() > self._due:
            self._due = time.monotonic() + EVERY_S
            for number in range(len(self._engines)):
                self._transfer(number)
        return True

    def _progress_until(self, holds: Callable[[], bool], limit_s: float) -> None:
        until = time.monotonic() + limit_s
        while not holds() and time.monotonic() < until:
            self.progress()

    # --- traffic

    def _transfer(self, number: int) -> None:
        """The engine publishes, the other one pulls."""
        sink = 1 - number
        if len(self._engines[sink].room) < NUM_BLOCKS:
            return
        self._counter += 1
        ref = self._engines[number].publish_new(f"t{self._counter}", self._counter)
        if ref is None:
            return
        try:
            self._pull(sink, ref, self._counter, DEADLINE_S, is_requested=False)
        except Exception as error:
            self._traffic.fail(f"raised {error!r}")

    def _pull(
        self, sink: int, ref: Any, request: int, deadline_s: float, *, is_requested: bool
    ) -> tuple[int, int]:
        engine = self._engines[sink]
        ids, engine.room = engine.room[:NUM_BLOCKS], engine.room[NUM_BLOCKS:]
        try:
            ticket = engine.start_pull(ref, ids, deadline_s)
        except BaseException:
            engine.room += ids
            raise
        self._pulls[sink, ticket.number] = Pulling(request, ids, time.monotonic(), is_requested)
        return sink, ticket.number

    def _take(self, number: int, engine: Engine, event: client.Event) -> None:
        match event:
            case client.Released():
                engine.reuse(event.transfer_id)
            case client.PublishRefused():
                engine.reuse(event.transfer_id)
                self._traffic.fail(f"refused {event.code}: {event.message}")
            case client.Delivered():
                self._ended(number, engine, event.ticket.number, "delivered", "", True)
            case client.Failed():
                code, ticket = str(event.code), event.ticket.number
                self._ended(number, engine, ticket, code, event.message, event.safe_to_reuse)
            case client.Quiesced():
                engine.room += self._pulls.pop((number, event.ticket.number)).ids
            case client.Disconnected():
                self._traffic.fail(f"disconnected {event.code}: {event.message}")

    def _ended(self, sink: int, engine: Engine, ticket: int, outcome: str, why: str, safe: bool) -> None:
        pull = self._pulls[sink, ticket]
        is_delivered = outcome == "delivered"
        wrong = engine.num_wrong(pull.request, pull.ids) if is_delivered and pull.request else 0
        if safe:
            del self._pulls[sink, ticket]
            engine.room += pull.ids
        self._traffic.wrong += wrong
        if pull.is_requested:
            self._ends[sink, ticket] = {"outcome": outcome, "wrong": wrong, "why": why}
            return
        took_ms = (time.monotonic() - pull.began) * 1e3
        self._traffic.slowest_ms = max(self._traffic.slowest_ms, took_ms)
        if is_delivered:
            self._traffic.done += 1
        else:
            self._traffic.fail(f"failed {outcome}: {why}")

    def count_anew(self) -> None:
        self._traffic = Traffic()

    def traffic(self) -> Traffic:
        """What has been done since `count_anew`."""
        return self._traffic

    # --- what an attack has it do

    def pull(
        self, sink: int, ref: Any, deadline_s: float = 5.0, request: int = 0, form: str = "dict",
        limit_s: float = 40.0,
    ) -> dict[str, Any]:  # fmt: skip
        """A router brought that reference. `request` 0: what it holds is nobody's matter."""
        try:
            key = self._pull(sink, _formed(ref, form), request, deadline_s, is_requested=True)
        except Exception as error:
            return _raised(error)
        self._progress_until(lambda: key in self._ends, limit_s)
        return self._ends.pop(key, {"outcome": "no answer", "why": f"it did not end in {limit_s} s"})

    def hint(self, sink: int, ref: Any, what: str, form: str = "dict") -> dict[str, Any]:
        """`prepare` or `abandon` of such a reference."""
        try:
            getattr(self._engines[sink].rank, what)(_formed(ref, form))
        except Exception as error:
            return _raised(error)
        return {"outcome": "taken"}

    def publish(self, source: int) -> dict[str, Any]:
        """A reference as a router has it, None where blocks lack."""
        self._counter += 1
        ref = self._engines[source].publish_new(f"t{self._counter}", self._counter)
        return {"ref": ref, "request": self._counter}

    def begin_half(self, home: str, name: str) -> None:
        """Start the first stage of an engine of two. The second never comes."""
        spec = spec_of(name, pp_size=2, home=home, publish_implies_ready=False)
        self._halves[name] = Engine(self._sockets[0], spec)

    def end_half(self, name: str) -> None:
        self._halves.pop(name).close()

    def connect_and_leave(self, at: int) -> None:
        client.connect(self._sockets[at], name="passing").close()

    def newcomer(self) -> dict[str, Any]:
        """Another engine of this user starts at the first daemon, and one more at the other reads from it."""
        self._counter += 1
        outcomes: list[str] = []
        name = f"late-{self._counter}"  # which goes on counting
        thread = threading.Thread(target=lambda: outcomes.append(self._try(name)), daemon=True)
        thread.start()
        self._progress_until(lambda: not thread.is_alive(), 3 * NEWCOMER_S)
        return {"outcome": outcomes[0] if outcomes else "it never ended"}

    def _try(self, name: str) -> str:
        """Return "done", or what went wrong. Each start and the pull may take NEWCOMER_S."""
        opened: list[Engine] = []
        try:
            for socket, own in zip(self._sockets, (name, f"{name}-reader"), strict=True):
                opened.append(Engine(socket, spec_of(own)))
            source, sink = opened
            ids = sink.room[:NUM_BLOCKS]
            ref = source.publish_new("new", 7_000)
            assert ref is not None
            pulled_in_s = sink.pull(ref, _held(7_000, ids)).elapsed_s
            wrong = sink.num_wrong(7_000, ids)
            took_s = max(source.started_in_s, sink.started_in_s, pulled_in_s)
            late = f"it took {took_s:.1f} s" if took_s > NEWCOMER_S else ""
            return f"{wrong} items wrong" if wrong else late or "done"
        except Exception as error:
            return repr(error)
        finally:
            for engine in opened:
                engine.close()


def _raised(error: Exception) -> dict[str, Any]:
    return {"outcome": "raised", "code": str(getattr(error, "code", "")), "why": repr(error)}


def _warm() -> None:
    """What is imported late is imported now."""
    layout = attention_layout(spec=spec_of("warm"), **FACTS | {"num_blocks": 1})
    memory = np.zeros(layout.regions[0].size_bytes, np.uint8)
    content.write(memory, layout, _held(1, [0], 16))
