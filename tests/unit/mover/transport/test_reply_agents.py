"""Agents that are loaded to send them a reply: bounded, and never in the way of reads."""

from __future__ import annotations

import pytest

from kvxferd.ids import AgentName
from kvxferd.mover.transport.base import MemoryRange
from kvxferd.mover.transport.reply_agents import IDLE_S, MAX_LOADED, ReplyAgents
from tests.support.memory_transport import Fabric, MemoryTransport

SPAN = MemoryRange(4096, 64)


class Rig:
    """A mover that replies, and agents that it replies to."""

    def __init__(self) -> None:
        self.fabric = Fabric()
        self.transport = MemoryTransport(self.fabric, AgentName("source"))
        self.read_from: set[AgentName] = set()
        self.agents = ReplyAgents(self.transport, self.read_from.__contains__)

    def make(self, name: str) -> MemoryTransport:
        made = MemoryTransport(self.fabric, AgentName(name))
        made.register(SPAN)
        return made

    def reply(self, to: MemoryTransport, now: float = 0.0) -> str:
        return self.agents.send(to.agent, to.metadata([SPAN]), b"reply", now)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_any_number_of_agents_is_answered_and_few_stay_loaded(rig: Rig) -> None:
    first = rig.make("first")
    for number in range(2 * MAX_LOADED):
        for one in (first, rig.make(f"x{number}")):
            assert rig.reply(one, float(number)) == ""
            assert one.receive_notifications() == [(rig.transport.agent, b"reply")]
        rig.agents.forget_idle(0.0)
        assert len(rig.agents) == len(rig.transport.loaded) <= MAX_LOADED
    assert first.agent in rig.transport.loaded


def test_an_idle_agent_is_dropped_and_loaded_again(rig: Rig) -> None:
    one, other = rig.make("one"), rig.make("other")
    rig.reply(one, 0.0)
    rig.reply(other, 1.0)
    rig.agents.forget_idle(IDLE_S + 0.5)
    assert rig.transport.loaded == {other.agent}
    assert rig.reply(one, IDLE_S + 1.0) == ""
    assert one.agent in rig.transport.loaded


def test_an_agent_that_is_read_from_stays_and_is_never_loaded_from_a_request(rig: Rig) -> None:
    one = rig.make("one")
    rig.read_from.add(one.agent)
    assert "not known here" in rig.reply(one)
    assert not rig.transport.loaded
    rig.transport.load_remote(one.metadata([SPAN]))
    assert rig.reply(one) == ""
    rig.agents.forget_idle(1e9)
    assert rig.transport.loaded == {one.agent}


def test_metadata_of_another_agent_is_refused(rig: Rig) -> None:
    one, other = rig.make("one"), rig.make("other")
    assert rig.agents.send(one.agent, other.metadata([SPAN]), b"reply", 0.0)
    assert not rig.transport.loaded
