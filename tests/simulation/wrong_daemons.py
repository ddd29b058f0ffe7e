"""Daemons that send what is out of place: a client leaves such a one, and keeps nothing of it."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from kvxferd import client
from kvxferd.client.session import HANDSHAKE_TIMEOUT_S
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.frame_socket import FrameSocket, close_fds
from kvxferd.ids import Ticket
from kvxferd.memory import FencePage
from kvxferd.wire import worker as wire
from kvxferd.wire.codec import CLIENT_MESSAGES, encode
from kvxferd.wire.common import Message
from tests.simulation.store import MemoryKind, Store
from tests.simulation.worker import Worker

COMES_S = 5.0  # within which a client comes, and says what it is
LEAVES_S = 0.2  # within which it leaves
STAYS_S = 0.8  # so much longer it would wait for a reply, and be a rank then


class WrongMessage(NamedTuple):
    """What is sent in the place of the reply to a message of that name; "": behind all replies."""

    to: str
    message: Message | None  # None: nothing is sent
    carries: str = ""  # "page" or "pidfd"
    within_s: float = LEAVES_S
    ends: tuple[Code, ...] = ()  # what its client hears: a rank that has published, and pulls


WELCOME = wire.Welcome(version=wire.WORKER_VERSIONS.newest, boot_id="boot", lease_s=8.0, max_hold_s=20.0)
REGISTERED = wire.Registered(request=1, endpoint="tcp://10.0.0.1:9441")
REFUSED = wire.Refused(request=1, code=Code.BUSY, message="")
OFFERED = wire.MoverOffered(number=1)
DELIVERED = wire.TicketDelivered(ticket=Ticket(1), bytes=1, runs=1, wire_s=0.0)
FAREWELL = wire.Farewell(code=Code.REGION_INVALID, message="")  # which no other attempt changes
FOR_REGISTERED = (
    WELCOME, REGISTERED, replace(REFUSED, request=2), wire.FdsRequest(request=2), OFFERED, DELIVERED,
    wire.Suspended(), wire.MoverRequest(), wire.PullsInterrupted(number=1, tickets=()),
)  # fmt: skip
BEHIND_ALL = (
    WELCOME, REFUSED, wire.FdsRequest(request=1), wire.Suspended(), wire.TicketQuiesced(ticket=Ticket(1)),
    replace(DELIVERED, ticket=Ticket(0)),
)  # fmt: skip
WRONG = [
    WrongMessage("Hello", None, within_s=HANDSHAKE_TIMEOUT_S + LEAVES_S),
    WrongMessage("Hello", replace(WELCOME, version=99)),
    WrongMessage("Hello", WELCOME, "page"),
    WrongMessage("Hello", REGISTERED),
    WrongMessage("Hello", OFFERED, "pidfd"),
    WrongMessage("Register", replace(REGISTERED, request=2), "page"),
    WrongMessage("Register", OFFERED, "page"),  # which nobody can wait for
    WrongMessage("", REGISTERED, "page"),
    WrongMessage("", wire.MoverChanged(), "page"),
    WrongMessage("Hello", replace(FAREWELL, code=Code.BAD_VERSION), ends=(Code.BAD_VERSION,)),
    WrongMessage("Register", FAREWELL, ends=(FAREWELL.code,)),
    WrongMessage("PullRequest", replace(FAREWELL, code=Code.NOT_ALLOWED), ends=(Code.DAEMON_LOST,)),
    WrongMessage("PullRequest", FAREWELL, ends=(Code.PUBLISHER_GONE, FAREWELL.code, FAREWELL.code)),
    *(WrongMessage("Register", one) for one in FOR_REGISTERED),
    *(WrongMessage("", one) for one in BEHIND_ALL),
]


def serve(path: Path, wrong: WrongMessage, wait: Callable[[int, float], bool], answers: list[object]) -> None:
    """Be a daemon for one client. `wait`: for a descriptor, return whether it is readable in time."""
    within_s = COMES_S
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        wait(listener.fileno(), within_s)
        link = FrameSocket(listener.accept()[0])
    path.unlink()

    def send(message: Message, carries: str = "") -> None:
        make = {"page": lambda: FencePage.create().fd, "pidfd": lambda: os.pidfd_open(os.getpid())}
        link.send(encode(message), (make[carries](),) if carries else ())

    while wait(link.fileno(), within_s):
        if (frames := link.receive()) is None:
            answers.append("left")
            break
        for frame in frames:
            close_fds(frame.fds)
            to = type(CLIENT_MESSAGES.decode(frame.payload)).__name__
            if to == "Hello" != wrong.to:
                send(WELCOME)
            if to == "Register" != wrong.to:
                send(REGISTERED, "page")
            if to == wrong.to or (to == "Register" and not wrong.to):
                within_s = wrong.within_s
                if wrong.message is not None:
                    send(wrong.message, wrong.carries)
                    send(OFFERED, "pidfd")  # it is read with what is wrong, and dropped
        link.flush()
    link.close()


def be_client(path: Path, worker: Worker, wrong: WrongMessage, answers: list[object]) -> None:
    """Be a rank like this worker, for a while; add to `answers` what is not as it should be then."""
    kernel, world = worker.world.kernel, worker.world
    assert worker.spec is not None
    assert worker.shape is not None
    store, stays_s = Store(worker.shape, MemoryKind.SHARED), wrong.within_s + STAYS_S
    before = world.num_fds()
    register = partial(client.Client.register, engine=worker.spec, layout=worker.shape.layout)
    try:
        with (
            client.connect(path, timeout_s=stays_s) as made,
            register(made, regions=store.regions, timeout_s=stays_s) as rank,
        ):
            with suppress(EngineError):
                register(made, regions=store.regions)
                answers.append("it is a rank twice")
            rank.pull(rank.publish("t1", {}, 1), {}, 1, stays_s)
            kernel.sleep(stays_s)
            ends = [event.why if isinstance(event, client.Released) else event.code for event in rank.poll()]
    except KvxferdError as error:
        ends = [error.code]
    if wrong.ends and tuple(ends) != wrong.ends:
        answers.append(f"it hears {ends}")
    if (left := world.num_fds() - before) > 0:
        answers.append(f"{left} descriptors are left")


def start(worker: Worker, wrong: WrongMessage, answers: list[object]) -> None:
    """Have a client meet such a daemon: `answers` is "left", and nothing more, some time later."""
    kernel, path = worker.world.kernel, worker.world.socket_of(worker.node).with_name("wrong.sock")

    def wait(fd: int, within_s: float) -> bool:
        return kernel.wait(((fd, select.EPOLLIN),), within_s)

    kernel.spawn(f"wrong daemon at {worker.node}", lambda: serve(path, wrong, wait, answers))
    kernel.spawn(f"its client at {worker.node}", lambda: be_client(path, worker, wrong, answers))
