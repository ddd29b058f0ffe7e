"""A rank in a process of its own, driven by a test through a pipe."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import select
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from kvxferd import client
from kvxferd.cli.demo import content
from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.memory import SealedMemory

GROUP = "full"
WAIT_S = 30.0


class Agent:
    """What runs in the process: a client, its rank and its memory."""

    def register(self, socket: str, spec: EngineSpec, **facts: Any) -> float:
        """Return the seconds it took."""
        self.layout = attention_layout(spec=spec, **facts)
        region = self.layout.regions[0]
        self.memory = SealedMemory.create(region.size_bytes, "kvxferd-test")
        self.bytes = np.frombuffer(self.memory.buffer, dtype=np.uint8)
        self.bytes[:] = content.background(self.bytes.size)
        self.client = client.connect(socket)
        started = time.monotonic()
        self.rank = self.client.register(
            engine=spec, layout=self.layout, regions={region.region: self.memory}
        )
        self.tickets: dict[int, client.PullTicket] = {}
        self.unread: list[client.Event] = []
        return time.monotonic() - started

    def write(self, request: int, ids: list[int], num_tokens: int) -> None:
        content.write(self.bytes, self.layout, content.Held(request, np.array(ids, np.int32), num_tokens))

    def publish(self, name: str, ids: list[int], num_tokens: int, **more: Any) -> dict[str, Any]:
        blocks = {GROUP: client.BlockList(first_token=0, ids=np.array(ids, np.int32))}
        return self.rank.publish(name, blocks=blocks, num_tokens=num_tokens, **more).to_dict()

    def ready(self, name: str) -> None:
        self.rank.ready(name)

    def prepare(self, ref: dict[str, Any]) -> None:
        self.rank.prepare(ref)

    def unpublish(self, ref: dict[str, Any]) -> None:
        self.rank.unpublish(ref)

    def pull(self, ref: dict[str, Any], ids: list[int], num_tokens: int, deadline_s: float = 20.0) -> int:
        self.before = self.bytes.copy()
        blocks = {GROUP: client.BlockList(first_token=0, ids=np.array(ids, np.int32))}
        ticket = self.rank.pull(ref, blocks=blocks, num_tokens=num_tokens, deadline_s=deadline_s)
        self.tickets[ticket.number] = ticket
        return ticket.number

    def cancel(self, ticket: int) -> None:
        self.tickets[ticket].cancel()

    def next_event(self, timeout_s: float = WAIT_S) -> tuple[str, dict[str, Any]] | None:
        """The next event's name and fields, None if none comes in time."""
        deadline = time.monotonic() + timeout_s
        while not self.unread:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            select.select([self.rank.fileno()], [], [], left)
            self.unread = list(self.rank.poll())
        event = self.unread.pop(0)
        fields = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
        if isinstance(fields.get("ticket"), client.PullTicket):
            fields["ticket"] = fields["ticket"].number
        fields.pop("blocks", None)
        return type(event).__name__, fields

    def num_wrong(self, request: int, ids: list[int], num_tokens: int) -> int:
        found = content.check(
            self.bytes, self.layout, content.Held(request, np.array(ids, np.int32), num_tokens)
        )
        assert found.checked_items > 0
        return found.wrong_items

    def num_spilled(self, ids: list[int]) -> int:
        """Bytes outside these blocks that changed since the last `pull`."""
        mask = content.block_mask(self.layout, np.array(ids, np.int32))
        return int(np.count_nonzero((self.bytes != self.before) & ~mask))

    def suspend(self) -> None:
        self.rank.suspend()

    def resume(self) -> None:
        self.rank.resume({self.layout.regions[0].region: self.memory})

    def memory_inode(self) -> int:
        return os.fstat(self.memory.fd).st_ino

    def close(self) -> None:
        self.client.close()


def _serve(pipe: Connection) -> None:
    agent = Agent()
    while True:
        try:
            name, args, kwargs = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            pipe.send((True, getattr(agent, name)(*args, **kwargs)))
        except Exception as error:
            code = getattr(error, "code", None)
            pipe.send((False, (type(error).__name__, None if code is None else str(code), str(error))))


class RankError(Exception):
    """What the agent raised."""

    def __init__(self, kind: str, code: str | None, message: str) -> None:
        super().__init__(f"{kind} [{code}]: {message}")
        self.code = code
        self.message = message


class RankProcess:
    """The test's end. Every method of `Agent` can be called."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.spec: EngineSpec | None = None

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def start(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Call without waiting; `finish` waits."""
        self._pipe.send((name, args, kwargs))

    def finish(self) -> Any:
        if not self._pipe.poll(60):
            raise TimeoutError("the rank process does not answer")
        good, value = self._pipe.recv()
        if not good:
            raise RankError(*value)
        return value

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.start(name, *args, **kwargs)
            return self.finish()

        return call

    def end_of(self, ticket: int) -> tuple[str, dict[str, Any]]:
        """The ticket's terminal event; others before it are dropped."""
        while (event := self.next_event()) is not None:
            name, fields = event
            if name in ("Delivered", "Failed") and fields["ticket"] == ticket:
                return name, fields
        raise AssertionError(f"ticket {ticket} never ended")

    def await_event(self, wanted: str) -> dict[str, Any]:
        while (event := self.next_event()) is not None:
            if event[0] == wanted:
                return event[1]
        raise AssertionError(f"no {wanted} came")

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)

    def stop(self) -> None:
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self.signal(signal.SIGCONT)
            self.kill()


def ranks_of(spec: EngineSpec) -> list[EngineSpec]:
    return [msgspec.structs.replace(spec, pp_rank=r.pp_rank, tp_rank=r.tp_rank) for r in spec.ranks()]
