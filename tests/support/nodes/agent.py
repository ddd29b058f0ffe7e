"""What runs in a rank process of the tests: a rank that sleeps, and has memory of any kind."""

from __future__ import annotations

import os
import resource
import select
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from kvxferd import client, resident
from kvxferd.fd_wait import wait_readable
from kvxferd.ids import RegionId
from kvxferd.layout import EngineSpec
from kvxferd.memory.device import ResidentMemory
from kvxferd.memory.driver import DRIVER_VARIABLE
from kvxferd.tooling import content
from kvxferd.tooling.content import RequestBlocks
from kvxferd.tooling.engine_process import EngineRank
from tests.support.fake_driver import FakeDriver

WAIT_S = 30.0


class Agent(EngineRank):
    """A rank whose pulls and events are looked at one by one."""

    more: ClassVar[dict[str, Any]] = {}  # for `resident.register`
    can_serve_again = True  # this process, once it has left
    unread: tuple[client.Event, ...] = ()

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__()
        os.environ.update(environ)
        self.tickets: dict[int, client.PullTicket] = {}

    def _register(self, spec: EngineSpec) -> client.RankHandle:
        if isinstance(self.store.memory, ResidentMemory):
            return resident.register(self.client, spec, self.layout, self._regions(), **self.more)
        return super()._register(spec)

    def use_transport(self, make: Callable[..., Any]) -> None:
        """Have resident movers made with that function."""
        self.can_serve_again = False
        self.more = {"make_transport": make}

    def _regions(self) -> dict[RegionId, Any]:
        return {RegionId(self.layout.regions[0].region): self.store.memory}

    def write(self, request: int, ids: Sequence[int], num_tokens: int, start: int = 0) -> None:  # type: ignore[override]
        super().write(blocks(ids, num_tokens, request), start)

    def publish(self, name: str, ids: Sequence[int], num_tokens: int, **more: Any) -> dict[str, Any]:  # type: ignore[override]
        return super().publish(name, blocks(ids, num_tokens), **more).to_dict()

    def pull(  # type: ignore[override]
        self, ref: Any, ids: Sequence[int], num_tokens: int, deadline_s: float = 20.0, **more: Any
    ) -> int:
        """Begin a pull; return its ticket, by its number. `more`: of `RankHandle.pull`."""
        self.store.load()
        self.before = self.store.bytes.copy()
        lists = self.block_lists(blocks(ids))
        ticket = self.rank.pull(ref, lists, num_tokens, deadline_s=deadline_s, **more)
        self.tickets[ticket.number] = ticket
        return ticket.number

    def num_wrong(self, request: int, ids: Sequence[int], num_tokens: int) -> int:
        found = self.check(blocks(ids, num_tokens, request))
        assert found.checked_items > 0
        return found.wrong_items

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
            self.unread = tuple(self.rank.poll())
        event, *rest = self.unread
        self.unread = tuple(rest)
        fields = {name: getattr(event, name) for name in type(event).__match_args__}
        if isinstance(fields.get("ticket"), client.PullTicket):
            fields["ticket"] = fields["ticket"].number
        fields.pop("blocks", None)
        return type(event).__name__, fields

    def num_spilled(self, ids: Sequence[int]) -> int:
        """Bytes outside these blocks that changed since the last pull began."""
        self.store.load()
        before = self.before.copy()
        return content.count_changed_outside(before, self.store.bytes, self.layout, blocks(ids).ids)

    def suspend(self) -> None:
        self.rank.suspend()

    def resume(self) -> None:
        self.rank.resume(self._regions())

    def free(self) -> None:
        """The engine sleeps: its memory goes. It wakes with a store in other than host memory alone."""
        self.store.free()

    def allocate(self) -> None:
        """The engine wakes: memory is there again, with what the copy holds."""
        self.store.allocate()
        self.store.save()

    def memory_inode(self) -> int:
        return os.fstat(self.store.memory.fd).st_ino

    def close(self) -> bool:
        """Return whether the memory may still be touched."""
        super().close()
        return self.may_be_touched()

    def may_be_touched(self) -> bool:
        return hasattr(self, "rank") and self.rank.memory_in_use

    def leave(self) -> bool:
        """Close what there is, and give the memory back. Return whether this process can serve again."""
        in_use = self.close()
        can_serve_again = self.can_serve_again
        if hasattr(self, "store"):
            # A GPU's memory that a process's context has is free when the process ends, not before.
            can_serve_again &= isinstance(getattr(self.store, "driver", None), FakeDriver | None)
            can_serve_again &= not (in_use and isinstance(self.store.memory, ResidentMemory))
            if can_serve_again and hasattr(self.store, "bytes"):
                self.store.free()
        os.environ.pop(DRIVER_VARIABLE, None)  # as a `TensorStore` sets it
        vars(self).clear()
        self.__init__({})  # type: ignore[misc]
        return can_serve_again

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
        drawn = np.random.default_rng(os.getpid()).integers(0, 256, self.store.bytes.size, dtype=np.uint8)
        self.store.bytes[:] = drawn

    def await_first_bytes(self) -> None:
        """Return once a pull has begun to write. Of a store whose `bytes` are the cache itself."""
        deadline = time.monotonic() + WAIT_S
        while np.array_equal(self.store.bytes[::65536], self.before[::65536]):
            assert time.monotonic() < deadline, "the pull writes nothing"

    def is_still(self, for_s: float = 0.3) -> bool:
        """Whether nothing is written for that time."""
        before = self.store.bytes.copy()
        select.select([], [], [], for_s)
        return bool(np.array_equal(self.store.bytes, before))


def blocks(ids: Sequence[int], num_tokens: int = 0, request: int = 0) -> RequestBlocks:
    """Blocks of the one group, and the content of that request."""
    return RequestBlocks(request, {"full": np.array(ids, np.int32)}, num_tokens)
