"""A registered rank, its scripted daemon and its mover; and the proof that nothing is left behind."""

from __future__ import annotations

import select
import threading
import time
from array import array
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from kvxferd.client import (
    BlockList,
    Client,
    Event,
    Failed,
    Publisher,
    PullTicket,
    RankHandle,
    TransferRef,
    connect,
)
from kvxferd.errors import Code
from kvxferd.ids import Endpoint, EngineId, Generation, Rank, RegionId, TransferId
from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.memory import SealedMemory
from kvxferd.wire import worker
from tests.support.nodes.waiting import wait_until
from tests.support.scripted_daemon import WAIT_S, DaemonSide, Mover, ScriptedDaemon

REGION = RegionId("kv")
SIZE = 64 << 10
SPEC = EngineSpec(engine_id=EngineId("decode-0"), generation=Generation("g1"), num_layers=1, num_kv_heads=2)
LAYOUT = attention_layout(
    spec=SPEC, num_kv_heads=2, head_dim=32, block_tokens=16, num_blocks=16, layout="NHD"
)
REF = TransferRef(
    endpoint=Endpoint("tcp://10.0.0.9:7701"),
    engine_id=EngineId("prefill-0"),
    generation=Generation("g9"),
    transfer_id=TransferId("req-1"),
    nonce="ab" * 16,
)


def blocks(*ids: int, first_token: int = 0) -> dict[str, BlockList]:
    """Blocks of the one group."""
    return {"full": BlockList(ids=array("i", ids or (1, 2, 3)), first_token=first_token)}


def events_of(session: Publisher, number: int = 1, deadline_s: float = WAIT_S) -> list[Event]:
    """Return at least so many events, waiting for them by the session's descriptor."""
    events: list[Event] = []
    deadline = time.monotonic() + deadline_s
    while len(events) < number:
        left = deadline - time.monotonic()
        assert left > 0, f"only {events} came"
        select.select([session.fileno()], [], [], left)
        events += session.poll()
    return events


def one_event(session: Publisher, deadline_s: float = WAIT_S) -> Event:
    """Return the one event that is there, or comes."""
    (event,) = events_of(session, 1, deadline_s)
    return event


def one_failure(session: Publisher) -> Failed:
    """Return the one event that is there, or comes: a pull's failure."""
    event = one_event(session)
    assert isinstance(event, Failed), event
    return event


class Kernel:
    """Work on a GPU: what a recorded `torch.cuda.Event` is to its user."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.done.is_set()

    def still_runs(self) -> None:
        """Return once somebody has looked and seen that it is not done."""
        seen = self.asked
        wait_until(lambda: self.asked > seen, "somebody looks at the event")


@dataclass
class Stage:
    """Everything that a test closes in the end, newest first."""

    daemon: ScriptedDaemon
    stack: ExitStack
    pool: ThreadPoolExecutor
    memory: SealedMemory
    side: DaemonSide = field(init=False)
    mover: Mover = field(init=False)
    register: worker.Register = field(init=False)  # of the rank

    def calling(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Make a blocking call in another thread, while the test plays the daemon."""
        return self.pool.submit(call, *args, **kwargs)

    def new_mover(self) -> Mover:
        self.mover = Mover()
        self.stack.callback(self.mover.close)
        return self.mover

    def client(self, lease_s: float = 30.0) -> Client:
        """A client that is greeted; `side` is the daemon's end."""
        connecting = self.calling(connect, self.daemon.path, timeout_s=WAIT_S)
        self.side = self.daemon.accept()
        self.side.greet(lease_s)
        client = connecting.result(WAIT_S)
        self.stack.callback(client.close)
        return client

    def registering(self, client: Client, **options: Any) -> Future[RankHandle]:
        """Register the rank in another thread."""
        regions = {REGION: self.memory}
        return self.calling(client.register, SPEC, LAYOUT, regions, **{"timeout_s": WAIT_S} | options)

    def rank(self, lease_s: float = 30.0) -> RankHandle:
        """A rank that is registered."""
        registering = self.registering(self.client(lease_s))
        self.register = self.side.register(self.new_mover())
        return registering.result(WAIT_S)

    def rejoin(self) -> DaemonSide:
        """Take the rank that comes back by itself, with a new mover."""
        self.accept().register(self.new_mover())
        return self.side

    def accept(self) -> DaemonSide:
        """Take the next connection, and greet it."""
        self.side = self.daemon.accept()
        self.side.greet()
        return self.side

    def take_publisher(self, *ranks: tuple[Rank, str]) -> worker.Attach:
        """Reply to `Attach`; the engine has these ranks, of these incarnations."""
        attach = self.side.expect(worker.Attach)
        if ranks:
            self.side.say(worker.EngineRanks(ranks=ranks))
        self.side.say_registered(attach.request)
        return attach

    def publisher(self, *ranks: tuple[Rank, str]) -> Publisher:
        """A publisher of an engine that has these ranks."""
        attaching = self.calling(self.client().attach, "prefill-0", "g7", WAIT_S)
        self.take_publisher(*ranks)
        return attaching.result(WAIT_S)

    def lose(self, session: Publisher) -> None:
        """End the daemon; return once the session has noticed."""
        self.daemon.stop()
        wait_until(lambda: not session.is_connected, "loss noticed")

    def publish(self, session: Publisher, name: str = "req-1", **options: Any) -> worker.Publish:
        """Publish blocks of 48 tokens; return what the daemon has got."""
        session.publish(name, blocks(), num_tokens=48, **options)
        published = self.side.expect(worker.Publish)
        assert published.transfer_id == name
        return published

    def pull(self, rank: RankHandle, deadline_s: float = 30.0) -> PullTicket:
        """A pull that its daemon has."""
        ticket = rank.pull(REF, blocks(), num_tokens=48, deadline_s=deadline_s)
        assert self.side.expect(worker.PullRequest).ticket == ticket.number
        return ticket

    def fail(self, ticket: PullTicket, is_safe: bool, code: Code = Code.TRANSPORT) -> None:
        """Have the daemon say that a pull has failed."""
        self.side.say(
            worker.TicketFailed(ticket=ticket.number, code=code, message="cannot", safe_to_reuse=is_safe)
        )


def delivered(ticket: PullTicket) -> worker.TicketDelivered:
    """What a daemon or a mover says of a pull that has arrived."""
    return worker.TicketDelivered(ticket=ticket.number, bytes=3, runs=2, wire_s=0.5)
