"""What waits behind a manifest, without a socket: it is taken whatever happens to what came before it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvxferd.control import peer_inbox
from kvxferd.control.peer_inbox import PeerInbox, Sender
from kvxferd.core import events as ev
from kvxferd.errors import Code
from kvxferd.ids import Endpoint
from kvxferd.wire.codec import encode
from kvxferd.wire.common import Message
from kvxferd.wire.peer import JoinRank, ManifestReply, PeerRefused
from tests.support.peer_socket_harness import HELLO, NoChecks, join_of

MEMBER = Sender(route=b"\0abcd", key="0a" * 32, address="127.0.0.1")
OTHER = Sender(route=b"\0efgh", key="0b" * 32, address="127.0.0.1")


class Harness:
    """An inbox whose thread waits until it is let go on."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[ev.Event] = asyncio.Queue()
        self.answered: list[Message] = []
        self.going_on = threading.Event()
        self.checks = NoChecks()
        self.is_defect: Callable[[ev.Event], bool] = lambda event: False  # once
        self.num_ticks = 0
        self.removed: set[str] = set()  # keys that are in the allow-list no more
        self.inbox = PeerInbox(
            lambda: self.checks,
            self._on_event,
            lambda route, message: self.answered.append(message),
            lambda sender: sender.key not in self.removed,
        )

    def _on_event(self, event: ev.Event) -> None:
        if self.is_defect(event):
            self.is_defect = lambda event: False
            raise RuntimeError("a defect")
        if isinstance(event, ev.Tick):
            self.num_ticks += 1
            return
        self.received.put_nowait(event)

    async def next(self) -> ev.Event:
        return await asyncio.wait_for(self.received.get(), 10)


@pytest.fixture
def harness(monkeypatch) -> Iterator[Harness]:
    made, checked = Harness(), peer_inbox.checked_layouts

    def slow(manifests, layouts):
        assert made.going_on.wait(10)
        return checked(manifests, layouts)

    monkeypatch.setattr(peer_inbox, "checked_layouts", slow)
    yield made
    made.going_on.set()
    made.inbox.close()


async def test_a_rank_is_joined_with_its_layout_checked_and_what_is_known_already_at_once(harness):
    harness.inbox.handle(MEMBER, encode(join_of()))
    assert harness.num_ticks == 1, (
        "what a refusal waits for may be over, though nothing has happened for long"
    )
    harness.going_on.set()
    checked = await harness.next()
    assert [layout.layout for layout in checked.layouts] == [join_of().manifest.layout]
    assert (await harness.next()).message == join_of()
    harness.inbox.handle(MEMBER, encode(join_of()))  # a heartbeat
    assert harness.received.get_nowait().message == join_of()


async def test_what_may_not_be_joined_is_neither_decoded_nor_checked(harness, monkeypatch):
    class Closed(NoChecks):
        def refusal_of_join(self, route, message, key):
            return PeerRefused(request=message.request, code=Code.NOT_ALLOWED, message="no")

    monkeypatch.setattr(peer_inbox, "decode_join_rank", lambda outline: pytest.fail("it was decoded"))
    harness.checks = Closed()
    harness.inbox.handle(MEMBER, encode(join_of()))
    assert harness.answered == [PeerRefused(request=7, code=Code.NOT_ALLOWED, message="no")]


async def test_an_engine_that_is_asked_for_is_read_and_one_that_is_not_is_dropped(harness):
    class Asking(NoChecks):
        def is_request_open(self, endpoint, request):
            return request == 5

    harness.checks = Asking()
    harness.going_on.set()
    for request in (4, 5):
        reply = ManifestReply(request=request, boot="b", ranks=(join_of().manifest,), num_ranks=1)
        harness.inbox.handle(Sender(endpoint=Endpoint("tcp://x:1")), encode(reply))
    assert isinstance(await harness.next(), ev.LayoutsChecked)
    assert (await harness.next()).message == reply
    assert harness.received.empty()


@pytest.mark.parametrize("defect", ["of the manifest", "of what waits first"])
async def test_what_waits_is_taken_where_what_came_before_could_not_be(harness, defect):
    def is_defect(event: ev.Event) -> bool:
        if defect == "of the manifest":
            return isinstance(event, ev.LayoutsChecked)
        return isinstance(event, ev.PeerRequest) and event.message == HELLO

    harness.is_defect = is_defect
    harness.inbox.handle(MEMBER, encode(join_of()))
    last = msgspec.structs.replace(HELLO, request=2)
    for request in (HELLO, last):
        harness.inbox.handle(MEMBER, encode(request))
    harness.going_on.set()
    received = [await harness.next() for _ in range(2 if defect == "of the manifest" else 3)]
    assert received[-1].message == last


async def test_a_connection_waits_for_no_work_that_could_not_be_given(harness, no_thread_left):
    with no_thread_left():
        harness.inbox.handle(MEMBER, encode(join_of()))
        harness.inbox.handle(MEMBER, encode(HELLO))
        assert (await harness.next()).message == HELLO
    assert len(harness.answered) == 1


async def test_what_has_waited_is_not_taken_from_a_key_that_was_removed_meanwhile(harness):
    """Neither the manifest nor what waits behind it; what another sends is."""
    for sender in (MEMBER, OTHER):
        harness.inbox.handle(sender, encode(join_of()))
        harness.inbox.handle(sender, encode(HELLO))
    harness.removed.add(MEMBER.key)
    harness.going_on.set()
    assert isinstance(await harness.next(), ev.LayoutsChecked)
    received = [await harness.next() for _ in range(2)]
    assert [event.key for event in received] == [OTHER.key] * 2
    assert harness.received.empty()
    assert not harness.answered
    assert MEMBER not in harness.inbox._deferred
    assert harness.inbox._deferred_bytes.held == 0


async def test_large_ranks_of_one_peer_keep_no_other_waiting(harness):
    """They are checked one after the other, while everybody else is listened to."""
    for number in range(8):
        harness.inbox.handle(MEMBER, encode(join_of(f"e{number}")))
    harness.inbox.handle(OTHER, encode(HELLO))
    assert (await harness.next()).message == HELLO
    harness.going_on.set()
    kinds = [type(await harness.next()) for _ in range(16)]
    assert kinds.count(ev.LayoutsChecked) == 8


async def test_what_waits_behind_a_manifest_has_a_limit(harness):
    harness.inbox._deferred_bytes.limit = 4096
    harness.inbox.handle(MEMBER, encode(join_of()))
    for _ in range(1000):
        harness.inbox.handle(MEMBER, encode(HELLO))
        assert harness.inbox._deferred_bytes.held <= 4096
    assert harness.inbox._deferred_bytes.held > 3000
    harness.inbox.handle(OTHER, encode(HELLO))
    assert (await harness.next()).message == HELLO
    harness.going_on.set()
    assert isinstance(await harness.next(), ev.LayoutsChecked)
    assert isinstance((await harness.next()).message, JoinRank)
    while harness.inbox._deferred_bytes.held:
        assert (await harness.next()).message == HELLO


async def test_a_bad_layout_is_refused_by_the_thread(harness):
    said = join_of()
    layout = msgspec.structs.replace(said.manifest.layout, end_layer=99)
    manifest = msgspec.structs.replace(said.manifest, layout=layout)
    harness.inbox.handle(MEMBER, encode(msgspec.structs.replace(said, manifest=manifest)))
    harness.inbox.handle(MEMBER, encode(HELLO))
    harness.going_on.set()
    assert (await harness.next()).message == HELLO
    (refused,) = harness.answered
    assert (refused.request, refused.code) == (7, Code.LAYOUT_INVALID)
