"""A daemon by hand whose key is admitted: its manifests, grants and answers are what it likes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from kvxferd.layout import PackedBlocks, pack_ids
from kvxferd.wire import peer
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.common import BlockIds, Message, RankManifest, TransferRef
from tests.proofs.hostile.attack import Scene, attack
from tests.proofs.hostile.attacks.peers import large_manifest
from tests.support.nodes.requests import TOKENS

Answer = Callable[[Any], list[Message]]


class DaemonByHand:
    """A ROUTER with the admitted key. `answer` gives what each question gets."""

    def __init__(self, scene: Scene, answer: Answer) -> None:
        self._reply = answer
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if scene.key is not None:
            self.socket.setsockopt(zmq.CURVE_SERVER, 1)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, scene.key.secret)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}" + (f"#{scene.key.public}" if scene.key else "")
        self.routes: set[bytes] = set()
        self._ends = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ends:
            if not self.socket.poll(50):
                continue
            route, content = self.socket.recv_multipart()
            self.routes.add(route)
            request: Any = PEER_MESSAGES.decode(content)
            if isinstance(request, peer.PeerHello):
                welcome = peer.PeerWelcome(
                    request=request.request, version=1, boot="evil", versions=peer.PEER_VERSIONS
                )
                self.socket.send_multipart([route, encode(welcome)])
                continue
            for message in self._reply(request):
                with suppress(zmq.ZMQError):
                    self.socket.send_multipart([route, encode(message)], zmq.NOBLOCK)

    def close(self) -> None:
        self._ends = True
        self._thread.join(5)
        self.socket.close(linger=0)
        self._context.term()


def ref_to(daemon: DaemonByHand, name: str) -> dict[str, Any]:
    return dict(msgspec.to_builtins(TransferRef(daemon.endpoint, name, "g1", "t", "0" * 32)))


def manifest_of(scene: Scene, place: str, engine: str) -> RankManifest:
    """What the daemon tells any admitted peer of an honest engine."""
    one = scene.peer(scene.stage.nodes[place])
    reply = one.send_request(peer.ManifestRequest(request=2, engine_id=engine, generation="g1", wait_s=2.0))
    assert isinstance(reply, peer.ManifestReply), reply
    return reply.ranks[0]


def serving(manifest: RankManifest) -> Answer:
    """A source that hands that manifest out and grants whatever is asked."""

    def reply(request: Any) -> list[Message]:
        if isinstance(request, peer.ManifestRequest):
            return [peer.ManifestReply(request=request.request, boot="evil", ranks=(manifest,), num_ranks=1)]
        if isinstance(request, peer.GrantRequest):
            ids = pack_ids(range(-(-TOKENS // 16)))
            granted = peer.GrantReply(
                request=request.request,
                grant=request.grant,
                blocks={"full": PackedBlocks(ids=ids)},
                num_tokens=TOKENS,
                lease_s=5.0,
                fence_agent=manifest.binding.agent,
                fence_address=manifest.binding.regions[0].address,
                fence_word=bytes(16),
                fence_metadata=manifest.binding.metadata,
            )
            return [granted]
        if isinstance(request, peer.RenewGrants):
            return [peer.GrantsRenewed(request=request.request, ended=())]
        return [peer.RequestDone(request=request.request)]

    return reply


def _bindings(mine: RankManifest, others: RankManifest) -> list[dict[str, Any]]:
    """What a hostile daemon may say of where its bytes lie: `mine` is an honest source's manifest."""
    true, agent = mine.binding.metadata, mine.binding.agent
    (region,) = mine.binding.regions
    nowhere = (msgspec.structs.replace(region, address=0x10_0000),)
    high = (msgspec.structs.replace(region, address=(1 << 47) - region.size_bytes),)
    return [
        {"agent": "evil/1", "metadata": os.urandom(500)},
        {"agent": "evil/2", "metadata": b""},
        {"agent": "evil/3", "metadata": true},  # which names another agent
        {"agent": "evil/4", "metadata": true[:-20]},
        {"agent": "evil/5", "metadata": bytes(2_000_000)},
        {"agent": "evil/6", "metadata": true[:60] + os.urandom(len(true) - 60)},
        {"agent": agent, "metadata": os.urandom(500)},  # an honest source's agent from here on
        {"agent": agent, "metadata": b""},
        {"agent": agent, "metadata": true[:-20]},
        {"agent": agent, "metadata": others.binding.metadata},
        {"agent": agent, "metadata": true[:60] + os.urandom(len(true) - 60)},
        {"agent": agent, "metadata": true, "regions": high},
        {"agent": agent, "metadata": true, "regions": nowhere},
    ]


@attack("peer", limit_s=170.0)
def false_remote_metadata(scene: Scene) -> str:
    """Manifests whose metadata is nonsense, empty, or a copy of an honest source's, whole and cut."""
    return _mislead(scene, lambda binding, agent: binding["agent"] != agent)


@attack("peer", limit_s=120.0)
def false_agents_of_others(scene: Scene) -> str:
    """Manifests that give an honest source's agent, with metadata or addresses that are not its own."""
    return _mislead(scene, lambda binding, agent: binding["agent"] == agent)


def _mislead(scene: Scene, is_meant: Callable[[dict[str, Any], str], bool]) -> str:
    if why := scene.newcomer():
        return why
    mine, others = manifest_of(scene, "a", scene.name), manifest_of(scene, "b", "honest-1")
    for number, changed in enumerate(_bindings(mine, others)):
        if not is_meant(changed, mine.binding.agent):
            continue
        binding = msgspec.structs.replace(mine.binding, **changed)
        spec = msgspec.structs.replace(mine.spec, engine_id=f"evil-{number}")
        daemon = DaemonByHand(scene, serving(RankManifest(spec, mine.layout, binding)))
        outcome, _ = scene.pull(ref_to(daemon, f"evil-{number}"), 3.0)
        scene.rest(0.3)
        why = scene.newcomer()  # the same rank reads from the true one
        daemon.close()
        if outcome == "hung":
            return f"the pull by manifest {number} never ended"
        if why:
            return f"manifest {number} (agent {changed['agent'][:8]}) cost others their pulls: {why}"
    return ""


@attack("peer", limit_s=60.0, fresh=True)
def answers_in_a_flood(scene: Scene) -> str:
    """A daemon that is asked once answers a hundred thousand times, and with block ids of no question."""
    daemon = DaemonByHand(scene, lambda request: [])
    scene.reader.prepare(ref_to(daemon, "flood"))
    scene.rest(1.0)
    route = next(iter(daemon.routes), b"")
    done = encode(peer.RequestDone(request=999_999))
    refused = encode(peer.PeerRefused(request=3, code="busy", message="x" * 100_000))
    ids = [encode(BlockIds(stream=n, group="full", offset=0, ids=bytes(8_000_000))) for n in range(8)]
    until = time.monotonic() + 6.0
    for number in range(60_000):
        content = ids[number % 8] if number % 5_000 < 8 else refused if number % 50 == 0 else done
        with suppress(zmq.ZMQError):
            daemon.socket.send_multipart([route, content], zmq.NOBLOCK)
        if time.monotonic() > until:
            break
    scene.rest(2.0)
    daemon.close()
    return ""


@attack("peer", limit_s=60.0)
def engines_learnt_without_end(scene: Scene) -> str:
    """A daemon tells of a hundred engines of thousands of tensors each."""

    def reply(request: Any) -> list[Message]:
        if isinstance(request, peer.ManifestRequest):
            made = large_manifest(request.engine_id, daemon.endpoint, 6_000, "evil/1")
            one = msgspec.structs.replace(made, spec=msgspec.structs.replace(made.spec, pp_size=1))
            return [peer.ManifestReply(request=request.request, boot="evil", ranks=(one,), num_ranks=1)]
        return []

    daemon = DaemonByHand(scene, reply)
    for number in range(24):
        scene.reader.prepare(ref_to(daemon, f"large-{number}"))
    scene.rest(4.0)
    daemon.close()
    return ""


@attack("peer", limit_s=80.0, imports=("nixl._api",))
def a_source_that_stalls(scene: Scene) -> str:
    """Pulls from a real agent that connects and then stops: others' pulls of the same rank go on."""
    import ctypes
    import signal

    from nixl._api import nixl_agent, nixl_agent_config

    mine = manifest_of(scene, "a", "honest-0")
    os.environ["HOME"] = "/tmp"  # the library looks there for its settings
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        agent = nixl_agent("evil/stall", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        memory = ctypes.create_string_buffer(mine.binding.regions[0].size_bytes)
        agent.register_memory([(ctypes.addressof(memory), len(memory), 0, "x")], "DRAM")
        metadata = agent.get_agent_metadata()
        os.write(write, ctypes.addressof(memory).to_bytes(8, "little") + metadata)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    found = os.read(read, 1 << 20)
    address = int.from_bytes(found[:8], "little")
    region = msgspec.structs.replace(mine.binding.regions[0], address=address)
    binding = msgspec.structs.replace(mine.binding, agent="evil/stall", metadata=found[8:], regions=(region,))
    spec = msgspec.structs.replace(mine.spec, engine_id="evil-stall")
    daemon = DaemonByHand(scene, serving(RankManifest(spec, mine.layout, binding)))
    outcomes = {scene.pull(ref_to(daemon, "evil-stall"), 2.0)[0] for _ in range(3)}
    why = scene.newcomer()
    scene.rest(15.0)
    daemon.close()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "it was delivered" if "delivered" in outcomes else why or scene.newcomer()
