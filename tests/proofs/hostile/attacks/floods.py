"""Connections that say nothing, never finish what they say, or never read."""

from __future__ import annotations

import contextlib
import os
import socket
import time

import msgspec

from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.wire import worker
from kvxferd.wire.common import BlockIds, FdBatch, TransferRef
from kvxferd.wire.framing import HEADER
from kvxferd.wire.limits import MAX_FRAME_BYTES
from tests.proofs.hostile.attacker import Scene
from tests.proofs.hostile.raw_protocol import FACTS, WorkerByHand, connected, frame
from tests.proofs.hostile.registry import Setup, attack

PART_BYTES = 4_000_000


def newcomer(scene: Scene, name: str, at: int = 0, timeout_s: float = 15.0) -> str:
    """Whether another engine of an honest user could start meanwhile."""
    came = scene.honest("newcomer", at=at, name=name, timeout_s=timeout_s)
    return "" if came["outcome"] == "done" else f"another user's engine could not start: {came}"


@attack("user")
def silent_connections(scene: Scene) -> str:
    """Hundreds of connections to the worker socket that say nothing, while another engine starts."""
    made = [connected(scene.a.worker_socket) for _ in range(300)]
    assert made
    return newcomer(scene, "late-silent")


@attack("user")
def many_greeted_sessions(scene: Scene) -> str:
    """Hundreds of connections of one user that have greeted and stay, while another engine starts."""
    with contextlib.suppress(OSError):
        for _ in range(300):
            if scene.worker().ended:
                break
    return newcomer(scene, "late-greeted")


@attack("user", fresh=True)
def half_frames(scene: Scene) -> str:
    """A hundred connections announce a frame of 4 MiB before they have greeted, and send all but its end."""
    made = []
    chunk = bytes(MAX_FRAME_BYTES - 1)
    for _ in range(100):
        with contextlib.suppress(OSError):
            one = connected(scene.a.worker_socket)
            made.append(one)
            one.sendall(HEADER.pack(MAX_FRAME_BYTES, 0, 0) + chunk)
    scene.rest(1.0)
    return ""


@attack("user", fresh=True)
def half_frames_after_hello(scene: Scene) -> str:
    """Sixty greeted connections announce a frame of 4 MiB and send all but its end."""
    chunk = HEADER.pack(MAX_FRAME_BYTES, 0, 0) + bytes(MAX_FRAME_BYTES - 1)
    for _ in range(60):
        with contextlib.suppress(OSError):
            scene.worker().raw(chunk)
    scene.rest(1.0)
    return ""


@attack("user")
def drops_of_a_frame(scene: Scene) -> str:
    """Fifty connections send a frame a byte at a time, for some seconds."""
    made = [connected(scene.a.worker_socket) for _ in range(50)]
    content = HEADER.pack(1000, 0, 0) + bytes(1000)
    for at in range(60):
        for one in made:
            with contextlib.suppress(OSError):
                one.send(content[at : at + 1])
        time.sleep(0.02)
    return ""


def _assemblies(session: WorkerByHand, num_streams: int, num_parts: int) -> None:
    ids = bytes(PART_BYTES)
    for stream in range(1, num_streams + 1):
        for part in range(num_parts):
            session.say(BlockIds(stream=stream, group="full", offset=part * PART_BYTES, ids=ids))


@attack("user", fresh=True)
def block_ids_after_hello_alone(scene: Scene) -> str:
    """A session that is no rank sends block ids for many requests, without a request."""
    _assemblies(scene.worker(), 8, 5)
    scene.rest(0.5)
    return ""


@attack("user", fresh=True)
def block_ids_after_attach(scene: Scene) -> str:
    """Sessions attached to engines that do not exist send block ids for many requests, without a request."""
    for number in range(4):
        session = scene.worker()
        session.say(worker.Attach(request=1, engine_id=f"nobody-{number}", generation="g"))
        session.await_one((worker.Registered, worker.Refused, worker.Farewell))
        with contextlib.suppress(OSError):
            _assemblies(session, 8, 3)
    scene.rest(0.5)
    return ""


@attack("worker", fresh=True)
def block_ids_of_a_rank(scene: Scene) -> str:
    """A registered rank sends as many block ids as it may for requests that never come."""
    session = scene.worker()
    session.register("idle-ids")
    _assemblies(session, 8, 10)
    scene.rest(0.5)
    return ""


@attack("user", setup=Setup(num_fds=1500))
def descriptors_after_hello_alone(scene: Scene) -> str:
    """Sessions that are no ranks send descriptors ahead of registrations that never come."""
    with open("/dev/null", "rb") as null:
        for num_fds, until in ((250, 1250), (100, 200), (20, 40)):
            with contextlib.suppress(OSError):
                session = scene.worker()
                for first in range(0, until, num_fds):
                    session.say(FdBatch(first=first), *[null.fileno()] * num_fds)
            scene.rest(0.1)
    scene.rest(0.3)
    return newcomer(scene, "late-fds")


@attack("user")
def descriptors_in_flight(scene: Scene) -> str:
    """Descriptors that no frame announces, and ones that close a circle of sockets."""
    session = scene.worker()
    left, right = socket.socketpair()
    with contextlib.suppress(OSError):
        for _ in range(20):
            session.raw(HEADER.pack(10, 0, 0), *[left.fileno(), right.fileno()] * 60)
    for _ in range(5):
        with contextlib.suppress(OSError):
            again = scene.worker()
            again.raw(frame(worker.Unpublish(transfer_id="t")), again.socket.fileno())
    scene.rest(0.3)
    return ""


@attack("user", fresh=True)
def refusals_that_are_not_read(scene: Scene) -> str:
    """Sessions that are no ranks ask for what is refused, again and again, and read no answer."""
    spec = EngineSpec(engine_id="unread" * 40, generation="g" * 250, num_layers=2, num_kv_heads=2)
    register = worker.Register(
        request=1, engine=spec, layout=attention_layout(spec=spec, **FACTS), regions=(), incarnation="i"
    )
    content = frame(register) * 64
    sessions = [scene.worker() for _ in range(16)]
    until = time.monotonic() + 8.0
    while time.monotonic() < until and sessions:
        for session in list(sessions):
            try:
                session.socket.send(content)
            except BlockingIOError:
                time.sleep(0.001)
            except OSError:
                sessions.remove(session)
    return ""


@attack("user")
def sessions_come_and_go(scene: Scene) -> str:
    """One user connects, greets and leaves as fast as it can, while another engine starts."""
    until = time.monotonic() + 4.0
    while time.monotonic() < until:
        made = WorkerByHand(scene.a.worker_socket)
        made.close()
    return newcomer(scene, "late-churn")


@attack("worker", setup=Setup(flags=("--limits-max-ranks", "32")))
def all_the_ranks(scene: Scene) -> str:
    """One user registers ranks until there is no room, while another engine starts."""
    with contextlib.suppress(OSError):
        for number in range(40):
            scene.worker().register(f"greedy-{number}")
    return newcomer(scene, "late-rank")


@attack("worker", limit_s=40.0)
def registrations_come_and_go(scene: Scene) -> str:
    """One user registers a rank and leaves, again and again, so that a mover is made each time."""
    until = time.monotonic() + 6.0
    number = 0
    while time.monotonic() < until:
        number += 1
        with contextlib.suppress(OSError):
            made = WorkerByHand(scene.a.worker_socket)
            made.register(f"churn-{number}", generation=os.urandom(4).hex())
            made.close()
    return newcomer(scene, "late-after-churn", timeout_s=20.0)


@attack("worker", setup=Setup(flags=("--limits-max-peers", "8")))
def all_the_peers(scene: Scene) -> str:
    """A rank prepares pulls from daemons that do not exist until no peer is left to be known."""
    session = scene.worker(scene.b)
    session.register("asks-many")
    for number in range(64):
        session.say(worker.Prepare(ref=reference(f"tcp://127.0.0.1:{20_000 + number}", scene)))
    scene.rest(0.3)
    # The other daemon is known to this one; one that is not yet is what is asked for.
    came = scene.honest(
        "pull", sink=1, ref=msgspec.to_builtins(reference("tcp://127.0.0.1:9", scene)), deadline_s=3.0
    )
    return "another user's pull is refused for want of room" if came["outcome"] == "busy" else ""


def reference(endpoint: str, scene: Scene) -> TransferRef:
    """One that leads nowhere, with an admitted key where there are keys."""
    key = f"#{scene.key.public}" if scene.key is not None else ""
    return TransferRef(
        endpoint=endpoint + key, engine_id="e", generation="g", transfer_id="t", nonce="0" * 32
    )


@attack("worker")
def all_the_bytes_in_flight(scene: Scene) -> str:
    """A rank over sparse memory asks for a pull of a terabyte from nobody, with a deadline of a day."""
    from kvxferd.layout import PackedBlocks
    from kvxferd.memory import SealedMemory

    block_bytes, num_blocks = 1 << 34, 4
    spec = EngineSpec(engine_id="sparse", generation="g1", num_layers=1, num_kv_heads=1)
    layout = attention_layout(
        spec=spec, num_kv_heads=1, head_dim=block_bytes // 64, block_tokens=16, num_blocks=num_blocks
    )
    memory = SealedMemory.create(layout.regions[0].size_bytes, "sparse")
    session = scene.worker(scene.b)
    reply = session.register("sparse", memory, layout, spec=spec)
    assert isinstance(reply, worker.Registered), reply
    pull = worker.PullRequest(
        ticket=1,
        ref=reference("tcp://127.0.0.1:9", scene),
        num_tokens=64,
        deadline_s=80_000.0,
        blocks={"full": PackedBlocks(ids=b"".join(n.to_bytes(4, "little") for n in range(4)))},
    )
    for ticket in range(1, 40):
        session.say(msgspec.structs.replace(pull, ticket=ticket))
    scene.rest(1.0)
    before = scene.send_request("traffic")["failed"]
    scene.rest(2.0)
    failed = scene.send_request("traffic")["failed"] - before
    return f"{failed} pulls of another user were refused" if failed else ""
