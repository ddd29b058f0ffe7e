"""A rank in a process of its own, driven by a test through a pipe."""

from __future__ import annotations

import dataclasses
import importlib
import multiprocessing
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import msgspec
import numpy as np

from kvxferd import client, resident
from kvxferd.demo import content
from kvxferd.fd_wait import wait_readable
from kvxferd.ids import RegionId
from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.memory.device import ResidentMemory
from kvxferd.memory.driver import DRIVER_VARIABLE
from kvxferd.memory.fake_driver import FakeDriver
from tests.support.nodes.stores import DeviceStore, HostStore, OwnStore
from tests.support.tensor_allocators import TensorStore

GROUP = "full"
WAIT_S = 30.0


class Agent:
    """What runs in the process: a client, its rank and its memory."""

    more: ClassVar[dict[str, Any]] = {}  # for `resident.register`
    can_serve_again = True  # where this process is as new once it has left

    def register(
        self, socket: str, spec: EngineSpec, store: dict[str, Any] | None = None, **facts: Any
    ) -> float:
        """Return the seconds it took.

        `store`: of `TensorStore` or `DeviceStore`; None: the cache is in host memory.
        """
        self.layout = attention_layout(spec=spec, **facts)
        size = self.layout.regions[0].size_bytes
        if store is None:
            self.store = HostStore(size)
        else:
            self.store = TensorStore(size, **store) if "tensor" in store else DeviceStore(size, **store)
        return self._join(socket, lambda: self._register(spec))

    def _register(self, spec: EngineSpec) -> client.RankHandle:
        if isinstance(self.store.memory, ResidentMemory):
            return resident.register(self.client, spec, self.layout, self._regions(), **self.more)
        return self.client.register(spec, self.layout, self._regions())

    def register_resident(self, socket: str, spec: EngineSpec, **facts: Any) -> float:
        """As `register`, with memory of this process alone, and its mover here."""
        self.layout = attention_layout(spec=spec, **facts)
        self.store = OwnStore(self.layout.regions[0].size_bytes)
        return self._join(socket, lambda: self._register(spec))

    def use_transport(self, path: str) -> None:
        """Have resident movers made with that function, given as module:name."""
        self.can_serve_again = False
        self.more = {"make_transport": _found(path)}

    def run(self, path: str, *args: Any) -> Any:
        """Call a function, given as module:name, with this agent in this process."""
        return _found(path)(self, *args)

    def _regions(self) -> dict[RegionId, Any]:
        return {self.layout.regions[0].region: self.store.memory}

    def _join(self, socket: str, register: Callable[[], client.RankHandle]) -> float:
        self.memory, self.bytes = self.store.memory, self.store.bytes
        self.bytes[:] = content.background(self.bytes.size)
        self.store.save()
        self.client = client.connect(socket)
        started = time.monotonic()
        self.rank = register()
        self.tickets: dict[int, client.PullTicket] = {}
        self.unread: list[client.Event] = []
        return time.monotonic() - started

    def write(self, request: int, ids: list[int], num_tokens: int) -> None:
        content.write(
            self.bytes, self.layout, content.RequestBlocks(request, np.array(ids, np.int32), num_tokens)
        )
        self.store.save()

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
        self.store.load()
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
            wait_readable([self.rank.fileno()], left)
            self.unread = list(self.rank.poll())
        event = self.unread.pop(0)
        fields = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
        if isinstance(fields.get("ticket"), client.PullTicket):
            fields["ticket"] = fields["ticket"].number
        fields.pop("blocks", None)
        return type(event).__name__, fields

    def num_wrong(self, request: int, ids: list[int], num_tokens: int) -> int:
        self.store.load()
        found = content.check(
            self.bytes, self.layout, content.RequestBlocks(request, np.array(ids, np.int32), num_tokens)
        )
        assert found.checked_items > 0
        return found.wrong_items

    def num_spilled(self, ids: list[int]) -> int:
        """Bytes outside these blocks that changed since the last `pull`."""
        self.store.load()
        mask = content.block_mask(self.layout, np.array(ids, np.int32))
        return int(np.count_nonzero((self.bytes != self.before) & ~mask))

    def suspend(self) -> None:
        self.rank.suspend()

    def resume(self) -> None:
        self.rank.resume(self._regions())

    def free(self) -> None:
        """The engine sleeps: its memory goes. It wakes only with a store in other than host memory."""
        del self.bytes
        self.store.free()

    def allocate(self) -> None:
        """The engine wakes: memory is there again, with what the copy holds."""
        self.store.allocate()
        self.bytes = self.store.bytes
        self.store.save()

    def used_bytes(self) -> int:
        """Of the store's GPU, as its driver counts them."""
        return self.store.driver.used_bytes(self.store.device)

    def memory_inode(self) -> int:
        return os.fstat(self.memory.fd).st_ino

    def close(self) -> bool:
        """Return whether the memory may still be touched."""
        self.client.close()
        return self.rank.memory_in_use

    def leave(self) -> bool:
        """Close what there is, and give the memory back. Return whether this process can serve again."""
        if hasattr(self, "client"):
            self.client.close()
        if hasattr(self, "store"):
            # A GPU's memory that a process's context has is free when the process ends, not before.
            self.can_serve_again &= isinstance(getattr(self.store, "driver", None), FakeDriver | None)
        if hasattr(self, "rank") and isinstance(self.memory, ResidentMemory):
            self.can_serve_again &= not self.rank.memory_in_use
        if self.can_serve_again and hasattr(self, "bytes"):
            self.free()
        can_serve_again = self.can_serve_again
        os.environ.pop(DRIVER_VARIABLE, None)  # as a `TensorStore` sets it
        vars(self).clear()
        return can_serve_again

    def may_be_touched(self) -> bool:
        return self.rank.memory_in_use

    def open_files(self, number: int) -> None:
        """What is opened from here on has a number above that."""
        self.can_serve_again = False
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (2 * number, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
        self.files = [os.open("/dev/null", os.O_RDONLY) for _ in range(number)]

    def num_threads(self) -> int:
        return len(os.listdir("/proc/self/task"))

    def scribble(self) -> None:
        """Put bytes into the whole cache that are nowhere else."""
        self.bytes[:] = np.random.default_rng(os.getpid()).integers(0, 256, self.bytes.size, dtype=np.uint8)

    def await_first_bytes(self) -> None:
        """Return once a pull has begun to write. Of a store whose `bytes` are the cache itself."""
        deadline = time.monotonic() + WAIT_S
        while np.array_equal(self.bytes[::65536], self.before[::65536]):
            assert time.monotonic() < deadline, "the pull writes nothing"

    def is_still(self, for_s: float = 0.3) -> bool:
        """Whether nothing is written for that time."""
        before = self.bytes.copy()
        select.select([], [], [], for_s)
        return bool(np.array_equal(self.bytes, before))


def _found(path: str) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def _serve(pipe: Connection, environ: dict[str, str]) -> None:
    os.environ.update(environ)
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

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, dict(environ or {})), daemon=True)
        self._process.start()
        theirs.close()
        self._is_called = False

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def start(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Call without waiting; `finish` waits."""
        self._is_called = True
        self._pipe.send((name, args, kwargs))

    def finish(self) -> Any:
        if not self._pipe.poll(60):
            raise TimeoutError("the rank process does not answer")
        self._is_called = False
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

    def leave(self) -> bool:
        """Return whether the process lives, has nothing registered any more, and can serve another test."""
        if not self._process.is_alive() or self._is_called:
            return False
        self.signal(signal.SIGCONT)
        self.start("leave")
        return bool(self.finish())

    def stop(self) -> None:
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self.signal(signal.SIGCONT)
            self.kill()


def ranks_of(spec: EngineSpec) -> list[EngineSpec]:
    return [msgspec.structs.replace(spec, pp_rank=r.pp_rank, tp_rank=r.tp_rank) for r in spec.ranks()]
