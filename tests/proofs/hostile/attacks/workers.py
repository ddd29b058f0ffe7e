"""Workers and their resident movers by hand: their memory, and what they say of themselves and of others."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket

from kvxferd.errors import Code
from kvxferd.frame_socket import FrameSocket
from kvxferd.layout import EngineSpec, PackedBlocks
from kvxferd.layout.presets import attention_layout
from kvxferd.memory import SealedMemory
from kvxferd.wire import mover, worker
from kvxferd.wire.codec import encode
from kvxferd.wire.common import MeasuredPlacement, Message, RegionAddress
from kvxferd.wire.limits import FENCE_PAGE_BYTES
from tests.proofs.hostile.attack import FACTS, Scene, WorkerByHand, attack
from tests.support.raw_worker import frame


class MoverByHand:
    """Registers a resident rank; `said` are the messages of its mover."""

    def __init__(self, scene: Scene, name: str) -> None:
        self.session: WorkerByHand = scene.worker()
        spec = EngineSpec(engine_id=name, generation="g1", num_layers=2, num_kv_heads=2)
        self.layout = attention_layout(spec=spec, **FACTS)
        (region,) = self.layout.regions
        ours, theirs = socket.socketpair()
        export = worker.RegionExport(
            region=region.region, size_bytes=region.size_bytes, kind="resident", address=1 << 30
        )
        how = {"incarnation": "i", "placement": "resident"}
        register = worker.Register(request=1, engine=spec, layout=self.layout, regions=(export,), **how)
        self.session.say(register, theirs.fileno(), theirs.fileno())  # also as the socket for deliveries
        theirs.close()
        self.link = FrameSocket(ours)
        self.addresses = (RegionAddress(region=region.region, address=1 << 30, size_bytes=region.size_bytes),)

    @classmethod
    def bound(cls, scene: Scene, name: str) -> MoverByHand:
        """One that is up and has bound its region, as far as the daemon can see."""
        made = cls(scene, name)
        agent = f"{scene.status['boot']}/{name}"
        made.say(mover.MoverUp(agent=agent, library="nixl 1", pid=1))
        scene.rest(0.3)
        made.say(mover.Bound(regions=made.addresses, metadata=os.urandom(200)))
        scene.rest(0.3)
        return made

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.link.send(encode(message))
            self.link.flush()

    def push(self, content: bytes) -> None:
        """As much as it takes."""
        with contextlib.suppress(OSError):
            os.set_blocking(self.link.fileno(), True)
            socket.socket(fileno=os.dup(self.link.fileno())).sendall(content)


@attack("worker", limit_s=60.0)
def a_mover_that_speaks_for_others(scene: Scene) -> str:
    """A resident mover takes an honest agent's name, answers pulls, fences and questions of others."""
    (rank,) = [r for e in scene.status["engines"] if e["engine_id"] == "honest-0" for r in e["ranks"]]
    thief = MoverByHand(scene, "thief")
    thief.say(mover.MoverUp(agent=rank["agent"], library="nixl 1", pid=1))
    scene.rest(0.3)
    other = MoverByHand.bound(scene, "meddler")
    outcome = mover.PullOutcome(delivered=True)
    for number in range(200):
        other.say(
            mover.PullDone(pull=number, outcome=outcome),
            mover.PullQuiesced(pull=number),
            mover.Polling(token=number),
            mover.FenceMapped(session=number, address=1 << 20, metadata=b"x"),
        )
    scene.rest(1.0)
    return ""


@attack("worker", limit_s=90.0)
def movers_that_never_stop(scene: Scene) -> str:
    """Resident movers send a hundred thousand messages in one breath, void ones too, and read nothing."""
    deaf, talker = (MoverByHand.bound(scene, name) for name in ("deaf", "talker"))
    seen = mover.TransportsSeen(reach="node", transports=("tcp/lo",), is_fully_parsed=True)
    for number in range(5):
        deaf.push(frame(mover.ChunkMemoryRequest(num_wanted=1) if number % 2 else seen) * 20_000)
        talker.push(frame(mover.Polling(token=1)) * 20_000)
    talker.push(frame(mover.ProbeResult(placement=MeasuredPlacement())) * 5_000)
    talker.push(frame(mover.MoverLeaving(code=Code.INTERNAL, message="x" * 10_000)) * 200)
    scene.rest(1.0)
    return ""


@attack("worker", limit_s=60.0)
def a_mover_of_many_bytes(scene: Scene) -> str:
    """A resident mover announces frames that never end, and metadata of megabytes."""
    boot = scene.status["boot"]
    for number in range(20):
        one = MoverByHand(scene, f"heavy-{number}")
        one.say(mover.MoverUp(agent=f"{boot}/heavy-{number}", library="nixl 1", pid=1))
        scene.rest(0.05)
        one.say(mover.Bound(regions=one.addresses, metadata=bytes(3_000_000)))
        scene.opened.append(one)
    scene.rest(1.0)
    return ""


@attack("worker")
def memory_with_holes(scene: Scene) -> str:
    """A rank punches holes into its own registered memory, and shrinks nothing, while others pull."""
    memory = SealedMemory.create(1 << 22, "holes")
    session = scene.worker()
    session.be_rank("holes", memory)
    for _ in range(50):
        with contextlib.suppress(OSError), mmap.mmap(memory.fd, 0) as mapped:
            mapped.madvise(mmap.MADV_REMOVE)
    scene.rest(0.5)
    return ""


@attack("worker")
def a_page_written_by_its_session(scene: Scene) -> str:
    """A session writes nonsense over its whole fence page, before and after each publish."""
    session = scene.worker()
    session.be_rank("scribbles")
    pages = list(session.fds)
    for number in range(64):
        ids = {"full": PackedBlocks(ids=bytes(4))}
        what = {"nonce": "0" * 32, "num_tokens": 16, "incarnations": (), "blocks": ids}
        session.say(worker.Publish(transfer_id=f"s{number}", fence_slot=number, **what))
        for fd in pages:
            with contextlib.suppress(OSError, ValueError), mmap.mmap(fd, FENCE_PAGE_BYTES) as mapped:
                mapped[:] = os.urandom(FENCE_PAGE_BYTES)
    scene.rest(0.5)
    return ""
