"""A worker: what it acknowledges, announces and promises is not so."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from typing import Any

from kvxferd.layout import EngineSpec, PackedBlocks, pack_ids
from kvxferd.layout.presets import attention_layout
from kvxferd.memory import SealedMemory
from kvxferd.wire import worker
from kvxferd.wire.common import FdBatch, TransferRef
from tests.proofs.hostile.attacker import Scene
from tests.proofs.hostile.attacks.fence_pages import page
from tests.proofs.hostile.attacks.floods import newcomer
from tests.proofs.hostile.honest_pair import FACTS, NUM_BLOCKS, TOKENS, spec_of
from tests.proofs.hostile.raw_protocol import WorkerByHand, connected, frame
from tests.proofs.hostile.registry import Setup, attack

REPLIES = (worker.Registered, worker.Refused, worker.Farewell)


def _rank(scene: Scene, name: str, **more: Any) -> WorkerByHand:
    """A registered rank that acknowledges its mover."""
    session = scene.worker()
    reply = session.register(name, incarnation="own", **more)
    assert isinstance(reply, worker.Registered), reply
    return session


@attack("worker", limit_s=60.0)
def movers_never_acknowledged(scene: Scene) -> str:
    """Ranks that acknowledge no mover: none may have their memory, and their sessions must end."""
    made = []
    for number in range(4):
        session = scene.worker()
        session.acknowledges = False
        memory = SealedMemory.create(1 << 20, "unwatched")
        session.register(f"unwatched-{number}", memory, wait_s=0.5)
        made.append((session, os.fstat(memory.fd).st_ino))
    until = time.monotonic() + 45.0
    while time.monotonic() < until and not all(session.ended for session, _ in made):
        for session, inode in made:
            if mappers := scene.send_request("mappers", inode=inode):
                return f"memory is mapped by {mappers}, and nobody watches them"
            session.next(0.05)
        scene.rest(0.5)
    if not all(session.ended for session, _ in made):
        return "a session that acknowledges no mover goes on"
    return newcomer(scene, "late-unwatched")


def _full_socket(kept: list[socket.socket]) -> int:
    """One that takes no packet more, and that nobody reads."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    there.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            there.send(bytes(100))
    kept += [here, there]
    return there.fileno()


@attack("worker", limit_s=80.0)
def strange_delivery_sockets(scene: Scene) -> str:
    """A delivery socket that is a file, a pipe, another kind of socket, or that nobody reads."""
    nothing = scene.worker()
    with contextlib.suppress(OSError):
        nothing.raw(frame(_empty_register("no-deliveries")))
        if not isinstance(nothing.await_one(REPLIES, 3.0), worker.Farewell):
            return "a registration without a socket was taken"
    read, write = os.pipe()
    kept: list[socket.socket] = []
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.connect(("127.0.0.1", 9))
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(b"\0kvxferd-hostile-%d" % os.getpid())
    listening.listen()
    control = connected(scene.a.worker_socket)
    strange = [
        page(100),
        os.open("/", os.O_PATH),
        os.open("/dev/null", os.O_RDWR),
        read,
        write,
        datagrams.fileno(),
        listening.fileno(),
        control.fileno(),
        _full_socket(kept),
    ]
    for number, fd in enumerate(strange):
        if problem := _pull_with(scene, f"noticed-{number}", fd):
            return problem
    for one in (*kept, datagrams, listening, control):
        one.close()
    return ""


def _empty_register(name: str) -> worker.Register:
    spec = spec_of(name)
    layout = attention_layout(spec=spec, **FACTS)
    return worker.Register(request=1, engine=spec, layout=layout, regions=(), incarnation="i")


def _pull_with(scene: Scene, name: str, deliveries: int) -> str:
    """Be an engine like the honest ones, with this delivery socket, and pull from one of them."""
    spec = spec_of(name)
    layout = attention_layout(spec=spec, **FACTS)
    session = scene.worker(scene.b)
    memory = SealedMemory.create(layout.regions[0].size_bytes, "noticed")
    with memory:
        reply = session.register(name, memory, layout, spec=spec, deliveries=deliveries)
        if not isinstance(reply, worker.Registered):
            return ""  # refused: as good
        for ticket in (1, 2):
            ref = scene.honest_ref()
            if ref is None:
                continue
            blocks = {"full": PackedBlocks(ids=pack_ids(range(NUM_BLOCKS)))}
            session.say(
                worker.PullRequest(
                    ticket=ticket,
                    ref=TransferRef(**ref),
                    blocks=blocks,
                    num_tokens=TOKENS,
                    deadline_s=8.0,
                )
            )
            ended = session.await_one((worker.TicketDelivered, worker.TicketFailed, worker.Farewell), 10.0)
            # Into a socket that takes packets the mover has said it, wherever they go.
            if isinstance(ended, worker.TicketFailed):
                return f"a pull with a delivery socket of {name} failed: {ended.code} {ended.message}"
    session.close()
    return ""


@attack("worker", limit_s=60.0)
def descriptors_that_were_promised(scene: Scene) -> str:
    """Registrations announce descriptors and send fewer, more, others, or register again meanwhile."""
    with SealedMemory.create(1 << 20, "promised") as memory:
        for number in (-1, 8193, 1 << 31, 1 << 62):
            session = scene.worker()
            reply = session.register(f"promised{number}", memory, num_descriptors=number)
            if number > 0 and isinstance(reply, worker.Registered):
                return f"a registration of {number} descriptors was taken with one"
        for number, (name, fds) in enumerate(
            (
                ("fewer", [memory.fd]),
                ("more", [memory.fd] * 250),
                ("others", [page(100, seals=0), os.open("/", os.O_RDONLY)]),
                ("none", []),
            )
        ):
            session = _promising(scene, f"promised-{name}", memory)
            with contextlib.suppress(OSError):
                session.say(FdBatch(first=1), *fds)
                session.say(FdBatch(first=7), *fds)
                session.say(FdBatch(first=0), *fds)
            if isinstance(session.await_one(REPLIES, 0.5), worker.Registered):
                return f"{name} were taken, case {number}"
        session = _promising(scene, "promised-again", memory)
        with contextlib.suppress(OSError):
            session.register("promised-again", memory, incarnation="own", num_descriptors=2, wait_s=0.5)
            session.say(FdBatch(first=1), memory.fd)
        if isinstance(session.await_one(REPLIES, 0.5), worker.Registered):
            return "what one registration announced was taken for another's"
    return newcomer(scene, "late-promised")


def _promising(scene: Scene, name: str, memory: SealedMemory) -> WorkerByHand:
    session = scene.worker()
    session.register(
        name, memory, incarnation="own", num_descriptors=3, answers=(worker.FdsRequest, *REPLIES)
    )
    return session


@attack("user", setup=Setup(num_fds=1500))
def descriptors_after_attach(scene: Scene) -> str:
    """Sessions attached to engines that do not exist send descriptors that belong to nothing."""
    with open("/dev/null", "rb") as null:
        for number in range(6):
            session = scene.worker()
            session.say(worker.Attach(request=1, engine_id=f"nobody-{number}", generation="g"))
            session.await_one(REPLIES)
            with contextlib.suppress(OSError):
                for first in range(0, 1250, 250):
                    session.say(FdBatch(first=first), *[null.fileno()] * 250)
    scene.rest(0.3)
    held = scene.send_request("num_fds", node="a")
    return f"the daemon holds {held} descriptors" if held > 900 else newcomer(scene, "late-attached-fds")


@attack("worker", limit_s=80.0)
def sleeping_and_waking_without_end(scene: Scene) -> str:
    """Ranks resume as mappings that were, or that nobody can name, and sleep again before a mover comes."""
    spec = EngineSpec(engine_id="restless", generation="g1", num_layers=2, num_kv_heads=2)
    facts = {"num_kv_heads": 2, "head_dim": 16, "block_tokens": 16, "num_blocks": 16}
    region = attention_layout(spec=spec, **facts).regions[0]
    exports = (worker.RegionExport(region=region.region, size_bytes=region.size_bytes),)
    with SealedMemory.create(region.size_bytes, "restless") as memory:
        session = _rank(scene, "restless", memory=memory, spec=spec)
        session.say(worker.Suspend())
        session.await_one(worker.Suspended, 5.0)
        for incarnation in ("own", "", "x" * 900_000):
            session.say(worker.Resume(request=2, regions=exports, incarnation=incarnation), memory.fd)
            reply = session.await_one(REPLIES, 5.0)
            if not isinstance(reply, worker.Refused):
                return f"resumed as {incarnation[:20]!r}: {reply}"
        began = len(scene.send_request("pids", node="a"))
        until, most = time.monotonic() + 4.0, 0
        with contextlib.suppress(OSError):
            for number in itertools.count():
                session.say(worker.Resume(request=3, regions=exports, incarnation=f"n{number}"), memory.fd)
                session.say(worker.Suspend())
                while session.next(0.0) is not None:
                    pass
                if number % 50 == 0:
                    most = max(most, len(scene.send_request("pids", node="a")))
                if time.monotonic() > until:
                    break
    if most > began + 40:
        return f"{most - began} movers were made for a rank that sleeps"
    return newcomer(scene, "late-restless", timeout_s=20.0)


@attack("user", fresh=True, limit_s=60.0)
def tiny_frames(scene: Scene) -> str:
    """Sixty greeted sessions send as many of the smallest frames as their sockets hold."""
    cancels = frame(worker.Cancel(ticket=1)) * 8000
    made = []
    with contextlib.suppress(OSError):
        for _ in range(60):
            made.append(scene.worker())
    until = time.monotonic() + 4.0
    while time.monotonic() < until and made:
        for session in list(made):
            try:
                session.socket.send(cancels)
            except BlockingIOError:
                continue
            except OSError:
                made.remove(session)
    return ""
