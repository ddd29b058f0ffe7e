"""The peer socket: from strangers who have no key, and from a peer whose key is admitted."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from functools import partial

import msgspec
import zmq

from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.wire import peer
from kvxferd.wire.codec import encode
from kvxferd.wire.common import Binding, RankManifest, RegionAddress, TransferRef
from kvxferd.wire.endpoint import address_of
from tests.proofs.hostile.attack import Scene, attack
from tests.proofs.hostile.honest_ranks import pass_by
from tests.support.raw_peer import PeerByHand, stranger_key

ZMTP = b"\xff" + bytes(8) + b"\x7f\x03\x00"


def raw(scene: Scene) -> socket.socket:
    host, _, port = address_of(scene.a.endpoint).removeprefix("tcp://").rpartition(":")
    made = socket.create_connection((host, int(port)), timeout=2.0)
    made.settimeout(2.0)
    return made


def greeting(mechanism: bytes, as_server: bytes = b"\0") -> bytes:
    return ZMTP + mechanism.ljust(20, b"\0") + as_server + bytes(31)


@attack("stranger")
def nonsense_at_the_peer_port(scene: Scene) -> str:
    """Random bytes, web requests, lengths past any memory, and mechanisms that are not there."""
    for content in (
        os.urandom(1 << 16),
        b"GET / HTTP/1.1\r\n\r\n",
        greeting(b"CURVE") + b"\x02" + b"\xff" * 9,
        greeting(b"CURVE") + b"\x04\xc8\x05HELLO" + os.urandom(194),
        greeting(b"CURVE") + b"\x04\x06\x05HELLO",
        greeting(b"PLAIN") + b"\x04\x10\x05HELLO" + bytes(10),
        greeting(b"NULL") + b"\x02" + (1 << 40).to_bytes(8, "big"),
        greeting(b"CURVE", b"\1"),
        greeting(b"\xff" * 20),
        b"\x01\x00" * 1000,
    ):
        for _ in range(5):
            with contextlib.suppress(OSError):
                one = raw(scene)
                one.sendall(content)
                one.recv(4096)
                one.close()
    return ""


@attack("stranger")
def an_older_zmtp_without_keys(scene: Scene) -> str:
    """Greetings of ZMTP 1.0 and 2.0, which know no keys, and then a question."""
    request = encode(PeerByHand.greeting())
    old = b"\x01\x00" + (bytes([len(request) + 1, 0]) if len(request) < 254 else b"") + request
    newer = ZMTP[:10] + b"\x01\x05" + b"\x00\x00" + bytes([0, len(request)]) + request
    for content in (old, newer):
        with contextlib.suppress(OSError):
            one = raw(scene)
            one.sendall(content)
            one.settimeout(0.5)
            reply = b""
            with contextlib.suppress(OSError):
                while chunk := one.recv(4096):
                    reply += chunk
            if b"connecting" in reply:
                return "a peer without a key was answered"
    return ""


@attack("stranger")
def handshakes_with_keys_nobody_admits(scene: Scene) -> str:
    """CURVE handshakes with new keys, by thirty connections that try again at once, for some seconds."""
    context = zmq.Context()
    made = []
    until = time.monotonic() + 4.0
    while time.monotonic() < until:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, 1)
        key = stranger_key()
        dealer.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(scene.a.endpoint.partition("#")[2]))
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(key.public))
        dealer.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
        dealer.connect(address_of(scene.a.endpoint))
        dealer.send(b"x", zmq.NOBLOCK)
        made.append(dealer)
        if len(made) > 30:
            made.pop(0).close(linger=0)
        time.sleep(0.005)
    for dealer in made:
        dealer.close(linger=0)
    context.term()
    return ""


@attack("stranger", keys=False, fresh=True)
def small_messages_in_the_clear(scene: Scene) -> str:
    """Where daemons have no keys: questions and nonsense by the ten thousand, no answer of which is read."""
    one = scene.peer()
    fetch = encode(peer.ManifestRequest(request=3, engine_id="honest-0", generation="g1", wait_s=0.0))
    with contextlib.suppress(zmq.ZMQError):
        for number in range(60_000):
            one.socket.send(fetch if number % 2 else b"\xc1" * 40, zmq.NOBLOCK)
    scene.rest(3.0)
    return ""


def large_manifest(engine_id: str, home: str, num_tensors: int, agent: str) -> RankManifest:
    spec = EngineSpec(engine_id, "g1", num_tensors // 2, num_kv_heads=1, pp_size=2, home=home)
    whole = msgspec.structs.replace(spec, pp_size=1)  # this rank has the layers of both stages
    layout = attention_layout(spec=whole, num_kv_heads=1, head_dim=16, block_tokens=16, num_blocks=4)
    region = layout.regions[0]
    address = RegionAddress(region=region.region, address=1 << 40, size_bytes=region.size_bytes)
    return RankManifest(spec, layout, Binding(agent, b"m" * 100, (address,), "i"))


@attack("peer")
def large_joins(scene: Scene) -> str:
    """Eight ranks of thousands of tensors each are joined to their home."""
    one = scene.peer()
    manifest = large_manifest("joined", scene.a.endpoint, 8_000, "by-hand/1")
    for number in range(10, 18):
        one.say(peer.JoinRank(request=number, boot="by-hand", manifest=manifest, secret="s"))
    scene.rest(4.0)
    return ""


@attack("peer", limit_s=60.0)
def sessions_end_while_thousands_wait(scene: Scene) -> str:
    """A peer has thousands of questions wait for a rank that lacks, while a worker connects and leaves."""
    half = {"pp_size": 2, "home": scene.a.endpoint}
    scene.stage.register(scene.stage.spares[0], "a", "lacking", **half)  # the other half never comes
    one = scene.peer()
    ref = TransferRef(scene.a.endpoint, "lacking", "g1", "t", "0" * 32)
    who = peer.Consumer("x", "g", (0, 0), 1)
    for number in range(8000):
        which = {"request": 10 + number, "grant": f"g{number}"}
        one.say(peer.GrantRequest(**which, ref=ref, consumer=who, reads=(), wait_s=10.0))
    scene.rest(1.0)
    for _ in range(20):
        scene.stage.spares[1].run(partial(pass_by, scene.a.worker_socket))
    scene.rest(1.0)
    return ""
