"""What must be true of memory when an engine hears that it may use it again."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from kvxferd.ids import AgentName, EngineId, Generation, TransferId
from kvxferd.wire.codec import PEER_MESSAGES
from kvxferd.wire.limits import FENCE_WORD_BYTES
from kvxferd.wire.peer import GrantReply, GrantRequest
from tests.simulation.contents import Lists
from tests.simulation.fabric import Fabric
from tests.simulation.network import Wire
from tests.simulation.store import Store

TransferName = tuple[EngineId, Generation, TransferId]


class Mapping(NamedTuple):
    """A part of a file that is mapped into this process, and so into one of the simulated ones."""

    begin: int
    end: int
    offset: int
    inode: int


def mappings() -> Iterator[Mapping]:
    """Yield all mapped memory files."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "/memfd:" in line:
                span, _, offset, _, inode, *_ = line.split(maxsplit=5)
                begin, end = (int(text, 16) for text in span.split("-"))
                yield Mapping(begin, end, int(offset, 16), int(inode))


class Words:
    """The fence words that readers were granted, as they went over the network."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self._requested: dict[tuple[Wire, int], TransferName] = {}
        self.granted: dict[TransferName, set[tuple[AgentName, int, bytes]]] = {}

    def saw(self, wire: Wire, payload: bytes) -> None:
        """Look at a message between two daemons."""
        if b"GrantRe" not in payload[:32]:
            return
        match PEER_MESSAGES.decode(payload):
            case GrantRequest() as message:
                ref = message.ref
                self._requested[wire, message.request] = (ref.engine_id, ref.generation, ref.transfer_id)
            case GrantReply() as message:
                if (name := self._requested.get((wire, message.request))) is not None:
                    word = (message.fence_agent, message.fence_address, message.fence_word)
                    self.granted.setdefault(name, set()).add(word)

    def holder_of(self, name: TransferName) -> AgentName | None:
        """Return an agent at which a reader would still find a transfer's word."""
        for agent, address, word in self.granted.get(name, ()):
            mover = self.fabric.agents.get(agent)
            is_there = mover is not None and mover.holds(address, FENCE_WORD_BYTES)
            if is_there and ctypes.string_at(address, FENCE_WORD_BYTES) == word:
                return agent
        return None


def writers_of(fabric: Fabric, store: Store, lists: Lists) -> list[str]:
    """Return the processes with reads under way that may write these blocks."""
    reads = [(mover, read) for mover in fabric.agents.values() for read in mover.reads if read.may_write]
    if not reads or store.is_freed:
        return []
    is_of_blocks = _writes_to(store, lists)
    writers = (mover for mover, read in reads if any(is_of_blocks(*landing) for landing in read.to_land()))
    return [*dict.fromkeys(mover.process.name for mover in writers)]


def posts_into(fabric: Fabric, store: Store, lists: Lists, since: float) -> int:
    """Return how many reads were posted since then that write these blocks."""
    is_of_blocks = _writes_to(store, lists)
    posts = (post for mover in fabric.agents.values() for post in mover.posts if post.at >= since)
    return sum(is_of_blocks(post.local, 1) for post in posts)


def _writes_to(store: Store, lists: Lists) -> Callable[[int, int], bool]:
    """Return whether something lands in these blocks, by its address in a simulated process and its size."""
    masks = dict(zip((os.fstat(m.fd).st_ino for m in store.memories), store.masks_of(lists), strict=True))
    mapped = [one for one in mappings() if one.inode in masks]

    def is_of_blocks(local: int, size: int) -> bool:
        found = (one for one in mapped if one.begin <= local < one.end)
        starts = ((one.inode, local - one.begin + one.offset) for one in found)
        return any(bool(np.any(masks[inode][at : at + size])) for inode, at in starts)

    return is_of_blocks
