"""Two honest engines that read from each other and check every byte: `python -m MODULE A B`.

A and B are worker sockets. Each engine is source and sink. What ends is a line of JSON on standard output;
commands come as lines of JSON on standard input, and each is answered by a line with its number.
"""

from __future__ import annotations

import json
import os
import queue
import select
import sys
import threading
import time
from typing import Any

import msgspec
import numpy as np

from kvxferd import client
from kvxferd.errors import KvxferdError
from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.memory import SealedMemory
from kvxferd.tooling import content
from kvxferd.wire.common import TransferRef
from tests.proofs.hostile.users import ENGINES

GROUP = "full"
FACTS: dict[str, Any] = {"num_kv_heads": 4, "head_dim": 32, "block_tokens": 16, "num_blocks": 64}
NUM_LAYERS = 4
NUM_BLOCKS = 8  # of a transfer
TOKENS = NUM_BLOCKS * 16 - 3
DEADLINE_S = 20.0  # the machine may have more to do than it has cores
EVERY_S = 0.1  # a transfer in each direction
JUNK = 254
HEARD = (client.Released, client.PublishRefused)


def spec_of(name: str, **more: Any) -> EngineSpec:
    facts: dict[str, Any] = {
        "num_layers": NUM_LAYERS,
        "num_kv_heads": FACTS["num_kv_heads"],
        "generation": "g1",
    }
    return EngineSpec(engine_id=name, **(facts | {"publish_implies_ready": True} | more))


class Engine:
    """One rank: half of its blocks are published from, half are pulled into."""

    def __init__(self, socket: str, spec: EngineSpec, timeout_s: float = 30.0) -> None:
        self.name = spec.engine_id
        self.layout = attention_layout(spec=spec, **FACTS)
        region = self.layout.regions[0]
        self.memory = SealedMemory.create(region.size_bytes, "kvxferd-hostile")
        self.bytes = np.frombuffer(self.memory.buffer, dtype=np.uint8)
        self.bytes[:] = content.background(self.bytes.size)
        self.regions = {region.region: self.memory}
        self.client = client.connect(socket, name="honest", timeout_s=timeout_s)
        try:
            self.rank = self.client.register(spec, self.layout, self.regions, timeout_s=timeout_s)
        except BaseException:
            self.client.close()
            raise
        half = FACTS["num_blocks"] // 2
        self.free = list(range(half))
        self.room = list(range(half, 2 * half))
        self.published: dict[str, list[int]] = {}

    def publish(self, name: str, request: int, **more: Any) -> dict[str, Any] | None:
        """Write and publish; None where blocks lack."""
        if len(self.free) < NUM_BLOCKS:
            return None
        ids, self.free = self.free[:NUM_BLOCKS], self.free[NUM_BLOCKS:]
        content.write(self.bytes, self.layout, _held(request, ids))
        self.published[name] = ids
        try:
            return self.rank.publish(name, _blocks(ids), TOKENS, lease_s=30.0, **more).to_dict()
        except KvxferdError:
            self.released(name)
            return None

    def released(self, name: str) -> None:
        """The blocks hold something else from now on."""
        ids = self.published.pop(name, [])
        for number in ids:
            held = _held(JUNK, [number], 16)
            content.write(self.bytes, self.layout, held)
        self.free += ids

    def num_wrong(self, request: int, ids: list[int]) -> int:
        return content.check(self.bytes, self.layout, _held(request, ids)).wrong_items


def _held(request: int, ids: list[int], num_tokens: int = TOKENS) -> content.RequestBlocks:
    return content.RequestBlocks(request, {GROUP: np.array(ids, np.int32)}, num_tokens)


def _blocks(ids: list[int]) -> dict[str, client.BlockList]:
    return {GROUP: client.BlockList(first_token=0, ids=np.array(ids, np.int32))}


def _formed(ref: Any, form: str) -> Any:
    """As a dict, as JSON in text or bytes, or as the struct itself with nothing checked."""
    if form == "struct" and isinstance(ref, dict):
        return TransferRef(**ref)
    if form in ("text", "bytes"):
        text = json.dumps(ref)
        return text if form == "text" else text.encode()
    return ref


class Pair:
    """`serve` until standard input ends."""

    def __init__(self, sockets: list[str]) -> None:
        self._sockets = sockets
        self._engines = [Engine(socket, spec_of(f"honest-{n}")) for n, socket in enumerate(sockets)]
        self._pulls: dict[tuple[int, int], tuple[int, list[int], float, int | None]] = {}
        self._said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._stages: dict[tuple[str, int], Engine] = {}
        self._counter = 0
        self._input = b""

    def serve(self) -> None:
        self._say(registered=True)
        due = 0.0
        while True:
            ready, _, _ = select.select([0, *(e.rank for e in self._engines)], [], [], 0.02)
            if 0 in ready and not self._command():
                return
            for number, engine in enumerate(self._engines):
                for event in engine.rank.poll():
                    self._take(number, engine, event)
            if time.monotonic() > due:
                due = time.monotonic() + EVERY_S
                for number in range(len(self._engines)):
                    self._transfer(number)
            while not self._said.empty():
                self._say(**self._said.get())

    def _say(self, **fields: Any) -> None:
        os.write(1, json.dumps(fields).encode() + b"\n")

    # --- traffic

    def _transfer(self, number: int) -> None:
        """The engine publishes, the other one pulls."""
        source, other = self._engines[number], 1 - number
        if len(self._engines[other].room) < NUM_BLOCKS:
            return
        self._counter += 1
        ref = source.publish(f"t{self._counter}", self._counter)
        if ref is not None:
            self._pull(other, ref, self._counter, DEADLINE_S, None)

    def _pull(self, sink: int, ref: Any, request: int, deadline_s: float, requested: int | None) -> None:
        engine = self._engines[sink]
        ids, engine.room = engine.room[:NUM_BLOCKS], engine.room[NUM_BLOCKS:]
        try:
            ticket = engine.rank.pull(ref, _blocks(ids), TOKENS, deadline_s)
        except BaseException as error:
            engine.room += ids
            if requested is None:
                self._say(end="failed", code=f"raised {error!r}", sink=sink, ms=0.0)
            else:
                self._say(
                    answer=requested, outcome="raised", code=str(getattr(error, "code", "")), why=repr(error)
                )
            return
        self._pulls[sink, ticket.number] = (request, ids, time.monotonic(), requested)

    def _take(self, number: int, engine: Engine, event: client.Event) -> None:
        match event:
            case client.Released() | client.PublishRefused():
                engine.released(event.transfer_id)
                if isinstance(event, client.PublishRefused):
                    self._say(end="refused", code=str(event.code), why=event.message, sink=number, ms=0.0)
            case client.Delivered():
                self._ended(number, engine, event.ticket.number, "delivered", "", True)
            case client.Failed():
                text = event.message
                self._ended(number, engine, event.ticket.number, str(event.code), text, event.safe_to_reuse)
            case client.Quiesced():
                _, ids, _, _ = self._pulls.pop((number, event.ticket.number))
                engine.room += ids
            case client.Disconnected():
                self._say(end="disconnected", code=str(event.code), why=event.message, sink=number, ms=0.0)

    def _ended(self, sink: int, engine: Engine, ticket: int, outcome: str, why: str, safe: bool) -> None:
        request, ids, began, requested = self._pulls[sink, ticket]
        took_ms = (time.monotonic() - began) * 1e3
        wrong = engine.num_wrong(request, ids) if outcome == "delivered" and request else 0
        if safe:
            del self._pulls[sink, ticket]
            engine.room += ids
        fields = {"outcome": outcome, "wrong": wrong, "why": why, "safe": safe, "ms": took_ms, "sink": sink}
        if requested is None:
            self._say(end="delivered" if outcome == "delivered" else "failed", code=outcome, **fields)
        else:
            self._say(answer=requested, **fields)

    # --- commands

    def _command(self) -> bool:
        chunk = os.read(0, 1 << 20)
        *lines, self._input = (self._input + chunk).split(b"\n")
        for line in lines:
            command = json.loads(line)
            getattr(self, "do_" + command.pop("do"))(command.pop("number"), **command)
        return bool(chunk)

    def do_pull(
        self, number: int, sink: int, ref: Any, deadline_s: float = 5.0, request: int = 0, form: str = "dict"
    ) -> None:
        """A router brought that reference. `request` 0: what it holds is nobody's matter."""
        self._pull(sink, _formed(ref, form), request, deadline_s, number)

    def do_hint(self, number: int, sink: int, ref: Any, what: str, form: str = "dict") -> None:
        """`prepare` or `abandon` of such a reference."""
        try:
            getattr(self._engines[sink].rank, what)(_formed(ref, form))
        except KvxferdError as error:
            self._say(answer=number, outcome="raised", code=str(error.code))
        except BaseException as error:
            self._say(answer=number, outcome="raised", code="", why=repr(error))
        else:
            self._say(answer=number, outcome="taken")

    def do_publish(self, number: int, source: int) -> None:
        """A reference as a router has it."""
        self._counter += 1
        ref = self._engines[source].publish(f"t{self._counter}", self._counter)
        self._say(answer=number, ref=ref, request=self._counter)

    def do_spread(self, number: int, home: str, stages: list[int], name: str = "spread") -> None:
        """An engine of two stages, the second of which is at the other daemon."""
        spec = spec_of(name, pp_size=2, home=home, publish_implies_ready=False)
        try:
            for stage in stages:
                own = msgspec.structs.replace(spec, pp_rank=stage)
                self._stages[name, stage] = Engine(self._sockets[stage], own)
        except KvxferdError as error:
            self._say(answer=number, outcome="refused", why=str(error))
        else:
            self._say(answer=number, outcome="done")

    def do_spread_publish(self, number: int, name: str = "spread") -> None:
        """The first stage publishes; the second has not written, and does not say so."""
        self._counter += 1
        first, transfer = self._stages[name, 0], f"spread-{self._counter}"
        ref = first.publish(transfer, self._counter)
        self._say(answer=number, ref=ref, request=self._counter, transfer=transfer)

    def do_spread_ready(self, number: int, transfer: str, request: int, name: str = "spread") -> None:
        """The second stage writes and says so."""
        first, second = self._stages[name, 0], self._stages[name, 1]
        ids = first.published[transfer]
        content.write(second.bytes, second.layout, _held(request, ids))
        second.rank.ready(transfer)
        self._say(answer=number, outcome="done")

    def do_spread_end(self, number: int, name: str = "spread") -> None:
        for key in [key for key in self._stages if key[0] == name]:
            self._stages.pop(key).client.close()
        self._say(answer=number, outcome="done")

    def do_connect_and_leave(self, number: int, at: int) -> None:
        client.connect(self._sockets[at], name="passing").close()
        self._say(answer=number, outcome="done")

    def do_newcomer(self, number: int, at: int, name: str, timeout_s: float = 15.0) -> None:
        """Another engine of this user starts at that daemon, and the pair reads from it."""
        threading.Thread(target=self._newcomer, args=(number, at, name, timeout_s), daemon=True).start()

    def _newcomer(self, number: int, at: int, name: str, timeout_s: float) -> None:
        began = time.monotonic()
        outcome, why = "done", ""
        try:
            source = Engine(self._sockets[at], spec_of(name), timeout_s)
            try:
                outcome, why = self._try(source, at, timeout_s)
            finally:
                source.client.close()
        except BaseException as error:
            outcome, why = "refused", repr(error)
        took_ms = (time.monotonic() - began) * 1e3
        self._said.put({"answer": number, "outcome": outcome, "why": why, "ms": took_ms})

    def _try(self, source: Engine, at: int, timeout_s: float) -> tuple[str, str]:
        """The newcomer publishes, and one more pulls at the other daemon."""
        sink = Engine(self._sockets[1 - at], spec_of(f"{source.name}-reader"), timeout_s)
        try:
            ref = source.publish("new", 7_000)
            ids = sink.room[:NUM_BLOCKS]
            sink.rank.pull(ref, _blocks(ids), TOKENS, timeout_s)
            while True:
                select.select([sink.rank], [], [], timeout_s + 1)
                for event in sink.rank.poll():
                    if isinstance(event, client.Failed):
                        return str(event.code), event.message
                    if isinstance(event, client.Delivered):
                        wrong = sink.num_wrong(7_000, ids)
                        return ("wrong", f"{wrong} items") if wrong else ("done", "")
        finally:
            sink.client.close()


def _warm() -> None:
    """What is imported late is imported now."""
    layout = attention_layout(spec=spec_of("warm"), **FACTS | {"num_blocks": 1})
    memory = np.zeros(layout.regions[0].size_bytes, np.uint8)
    content.write(memory, layout, _held(1, [0], 16))


if __name__ == "__main__":
    _warm()
    ENGINES.become()  # who may not be able to read where all of this lies
    Pair(sys.argv[1:3]).serve()
