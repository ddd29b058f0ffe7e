"""Fence pages and regions that are not what they should be."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

from kvxferd.layout import PackedBlocks
from kvxferd.memory import SealedMemory
from kvxferd.wire import worker
from kvxferd.wire.limits import FENCE_PAGE_BYTES
from tests.proofs.hostile.attacker import Scene
from tests.proofs.hostile.attacks.floods import newcomer
from tests.proofs.hostile.raw_protocol import WorkerByHand
from tests.proofs.hostile.registry import attack

SEAL_WRITE, SEAL_FUTURE_WRITE = 0x8, 0x10
MFD_HUGETLB = 0x4


def page(size: int = FENCE_PAGE_BYTES, seals: int = fcntl.F_SEAL_SHRINK, flags: int = 0) -> int:
    fd = os.memfd_create("page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@attack("user")
def an_id_attached_first(scene: Scene) -> str:
    """Attached first to an engine's id, with a good page, before its ranks register."""
    session = scene.worker()
    session.say(worker.Attach(request=1, engine_id="late-attached", generation="g1"))
    session.await_one((worker.Registered, worker.Refused, worker.Farewell))
    return newcomer(scene, "late-attached")


@attack("user")
def strange_regions(scene: Scene) -> str:
    """Regions that are short, unsealed, read-only, on huge pages, or no memory at all."""
    read, _ = os.pipe()
    whole = SealedMemory.create(1 << 20, "whole")
    reopened = os.open(f"/proc/self/fd/{whole.fd}", os.O_RDONLY)
    strange = [
        page(100),
        page(1 << 20, seals=0),
        os.open("/", os.O_RDONLY),
        read,
        reopened,
        os.open("/dev/zero", os.O_RDWR),
    ]
    with contextlib.suppress(OSError):
        strange.append(page(1 << 21, flags=MFD_HUGETLB))

    class Odd:
        def __init__(self, fd: int) -> None:
            self.fd = fd

    for number, fd in enumerate(strange):
        with contextlib.suppress(OSError):
            made = WorkerByHand(scene.a.worker_socket)
            reply = made.register(f"odd-{number}", Odd(fd))  # type: ignore[arg-type]
            made.close()
            if isinstance(reply, worker.Registered):
                return f"region {number} was taken"
    return ""


@attack("worker")
def memory_with_holes(scene: Scene) -> str:
    """A rank punches holes into its own registered memory, and shrinks nothing, while others pull."""
    memory = SealedMemory.create(1 << 22, "holes")
    session = scene.worker()
    session.register("holes", memory)
    for _ in range(50):
        with contextlib.suppress(OSError), mmap.mmap(memory.fd, 0) as mapped:
            mapped.madvise(mmap.MADV_REMOVE)
    scene.rest(0.5)
    return ""


@attack("worker")
def a_page_written_by_its_session(scene: Scene) -> str:
    """A session writes nonsense over its whole fence page, before and after each publish."""
    session = scene.worker()
    session.register("scribbles")
    pages = list(session.fds)
    for number in range(64):
        session.say(
            worker.Publish(
                transfer_id=f"s{number}",
                nonce="0" * 32,
                num_tokens=16,
                fence_slot=number % 5000,
                incarnations=(),
                blocks={"full": PackedBlocks(ids=bytes(4))},
            )
        )
        for fd in pages:
            with contextlib.suppress(OSError, ValueError), mmap.mmap(fd, FENCE_PAGE_BYTES) as mapped:
                mapped[:] = os.urandom(FENCE_PAGE_BYTES)
    scene.rest(0.5)
    return ""
