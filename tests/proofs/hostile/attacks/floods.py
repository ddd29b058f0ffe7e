"""Connections that say nothing, never finish what they say, or never read."""

from __future__ import annotations

import contextlib
import socket
import time

from kvxferd.wire import worker
from kvxferd.wire.common import TransferRef
from kvxferd.wire.framing import HEADER
from kvxferd.wire.limits import MAX_FRAME_BYTES
from tests.proofs.hostile.attack import Scene, WorkerByHand, attack
from tests.support.raw_worker import connected, frame


@attack("user")
def connections_that_stay(scene: Scene) -> str:
    """Hundreds of connections of one user, which say nothing or have greeted, while another engine starts."""
    silent = [connected(scene.a.worker_socket) for _ in range(300)]
    if why := scene.newcomer():
        return f"beside silent ones: {why}"
    for one in silent:
        one.close()
    with contextlib.suppress(OSError):
        for _ in range(300):
            if scene.worker().ended:
                break
    return scene.newcomer()


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


@attack("user")
def sessions_come_and_go(scene: Scene) -> str:
    """One user connects, greets and leaves as fast as it can, while another engine starts."""
    until = time.monotonic() + 4.0
    while time.monotonic() < until:
        made = WorkerByHand(scene.a.worker_socket)
        made.close()
    return scene.newcomer()


def reference(endpoint: str, scene: Scene) -> TransferRef:
    """One that leads nowhere, with an admitted key where there are keys."""
    key = f"#{scene.key.public}" if scene.key is not None else ""
    return TransferRef(
        endpoint=endpoint + key, engine_id="e", generation="g", transfer_id="t", nonce="0" * 32
    )


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
