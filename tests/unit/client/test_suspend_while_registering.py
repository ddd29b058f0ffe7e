"""A rank that sleeps while its registration is under way: the reply to that one is never another's."""

from __future__ import annotations

import pytest

from kvxferd.client import Suspended
from kvxferd.client.events import Event
from kvxferd.client.fence_slots import FenceSlots
from kvxferd.client.memory_export import MemoryExport
from kvxferd.client.registration import RankRole
from kvxferd.client.session import ClientSession
from kvxferd.errors import Code, EngineError
from kvxferd.ids import RegionId
from kvxferd.wire import worker
from tests.support.client_harness import LAYOUT, REGION, SPEC
from tests.support.fence_page import SharedFencePage


def exports() -> MemoryExport:
    """Each has an incarnation of its own."""
    return MemoryExport((worker.RegionExport(RegionId(REGION), 4096),), ())


def test_suspended_waits_for_the_reply_to_a_registration_that_is_under_way() -> None:
    """The daemon has the descriptors of the first memory, and would map it for the resume's."""
    events: list[Event] = []
    page = SharedFencePage()
    try:
        session = ClientSession("rank", FenceSlots(), 1, events.append)
        session.register(RankRole(SPEC, LAYOUT, exports()))
        session.connection_made(0.0)
        welcome = worker.Welcome(version=worker.WORKER_VERSIONS.newest, boot_id="boot", lease_s=30.0)
        session.handle(welcome, 0.0)
        sent = [session.pop_outgoing(0.0) for _ in range(2)]
        assert sent[1] is not None
        assert isinstance(sent[1].message, worker.Register)

        session.suspend()
        session.tick(0.1)
        assert events == []
        with pytest.raises(EngineError, match="before its Suspended") as e:
            session.resume(exports())
        assert e.value.code is Code.OUT_OF_PLACE

        session.offer_fence_page(page)
        session.handle(worker.Registered(request=sent[1].message.request, endpoint="tcp://n:1"), 0.2)
        outgoing = session.pop_outgoing(0.2)
        assert outgoing is not None
        assert isinstance(outgoing.message, worker.Suspend)
        session.handle(worker.Suspended(), 0.3)
        assert events == [Suspended()]
    finally:
        page.close()
