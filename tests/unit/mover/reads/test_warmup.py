"""Connections made ahead of the first pull: a word read for nothing, whatever becomes of it."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass, field

import pytest

from kvxferd.ids import AgentName
from kvxferd.mover.reads.remote_agents import RemoteAgents
from kvxferd.mover.reads.warmup import WARMUP_TIMEOUT_S, ConnectionWarmup
from kvxferd.mover.transport.base import MemoryRange, TransportError
from kvxferd.mover.transport.buffers import WordSlots
from kvxferd.mover.transport.staging import StagedTransport
from tests.support.memory_transport import Fabric, MemoryTransport

THERE = AgentName("there")


@dataclass
class Rig:
    """A reader, and an agent with a page to be read."""

    fabric: Fabric = field(default_factory=Fabric)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.page = mmap.mmap(-1, 4096)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.page))
        there = MemoryTransport(self.fabric, THERE)
        there.register(MemoryRange(self.address, 4096))
        self.metadata = there.metadata([MemoryRange(self.address, 4096)])
        here = MemoryTransport(self.fabric, AgentName("here"))
        self.remotes = RemoteAgents(StagedTransport(here))
        self.remotes.load(THERE, self.metadata)
        self.scratch = WordSlots(here)
        self.connecting = ConnectionWarmup(self.remotes, self.scratch, lambda: self.now)

    @property
    def num_reads(self) -> int:
        return len(self.fabric.posts)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_each_agent_is_met_once(rig: Rig) -> None:
    rig.fabric.polls_per_read = 1
    rig.connecting.start(THERE, rig.address)
    assert rig.connecting.is_busy
    assert rig.connecting.poll()
    assert not rig.connecting.is_busy
    rig.connecting.start(THERE, rig.address)
    assert rig.num_reads == 1
    rig.connecting.forget(THERE)
    rig.connecting.start(THERE, rig.address)
    assert rig.num_reads == 2


def test_what_cannot_be_posted_is_left_to_the_pull(rig: Rig) -> None:
    rig.connecting.start(THERE, rig.address + 4096)
    assert not rig.connecting.is_busy
    rig.connecting.start(THERE, rig.address)
    assert rig.num_reads == 1


def test_nobody_stays_awake_for_one_that_hangs(rig: Rig) -> None:
    rig.fabric.stalled.add(THERE)
    rig.connecting.start(THERE, rig.address)
    assert not rig.connecting.poll()
    rig.now = WARMUP_TIMEOUT_S
    assert not rig.connecting.is_busy
    rig.fabric.stalled.clear()
    assert rig.connecting.poll()  # whenever it is looked at again


@pytest.mark.parametrize("settled", [True, False])
def test_a_slot_comes_back_unless_something_may_still_land_there(rig: Rig, settled: bool) -> None:
    rig.fabric.stalled.add(THERE)
    rig.connecting.start(THERE, rig.address)
    rig.fabric.stalled.clear()
    slots = list(iter(rig.scratch.acquire, None))
    rig.fabric.errors[THERE] = TransportError("broken", settled=settled)
    assert rig.connecting.poll()
    assert (rig.scratch.acquire() is not None) == settled
    assert len(slots) == 1023


def test_an_agent_that_is_dropped_and_loaded_again_while_it_is_met_can_be_read(rig: Rig) -> None:
    rig.fabric.stalled.add(THERE)
    rig.connecting.start(THERE, rig.address)
    another, memory = MemoryTransport(rig.fabric, AgentName("another")), MemoryRange(rig.address, 4096)
    another.register(memory)
    rig.remotes.load(THERE, another.metadata([memory]))  # an error of the former life
    assert rig.remotes._ensure_loaded(THERE)
    rig.remotes.drop(THERE)
    rig.remotes.load(THERE, rig.metadata)
    assert not rig.remotes._ensure_loaded(THERE)
    rig.fabric.stalled.clear()
    rig.connecting.poll()
    assert not rig.remotes._ensure_loaded(THERE), "the end of the former read drops nothing"
