"""Daemons: their secrets change, they are ready without end."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from kvxferd.wire import peer
from kvxferd.wire.codec import encode
from kvxferd.wire.common import Message, RankManifest
from tests.proofs.hostile.attacker import Scene
from tests.proofs.hostile.attacks.peers import CLEAR, large_manifest
from tests.proofs.hostile.raw_protocol import PeerByHand
from tests.proofs.hostile.registry import attack

NUMBERS = itertools.count(1000)
SECRETS = ("", "guessed", "0" * 32, "x" * 100_000)


def _own_rank(scene: Scene, name: str, secret: str, one: PeerByHand) -> RankManifest | str:
    """Join the first of two ranks of an engine whose home is the daemon's."""
    manifest = large_manifest(name, scene.a.endpoint, 4, f"{name}/1")
    reply = one.send_request(
        peer.JoinRank(request=next(NUMBERS), boot="by-hand", manifest=manifest, secret=secret)
    )
    return manifest if isinstance(reply, peer.RequestDone) else f"cannot join a rank: {reply}"


def _about(manifest: RankManifest, secret: str, **more: Any) -> list[Message]:
    """All that may be said of a rank that was joined."""
    spec = manifest.spec
    facts: dict[str, Any] = {
        "engine_id": spec.engine_id,
        "generation": spec.generation,
        "rank": spec.rank,
        "secret": secret,
    }
    ready = peer.RankReady(
        request=next(NUMBERS), transfer_id="t", incarnation=manifest.binding.incarnation, **facts
    )
    boot = more.get("boot", "by-hand")
    leave = peer.LeaveRank(request=next(NUMBERS), boot=boot, agent=manifest.binding.agent, **facts)
    join = peer.JoinRank(request=next(NUMBERS), boot=boot, manifest=manifest, secret=secret)
    return [ready, join, leave]


def _speak_for(scene: Scene, engine: str) -> str:
    """Speak for the honest member of a spread engine, with every secret but its own."""
    came = scene.honest("spread", home=scene.a.endpoint, stages=[0, 1], name=engine)
    if came["outcome"] != "done":
        return f"no engine on two nodes: {came}"
    try:
        one = scene.peer()
        reply = one.send_request(
            peer.ManifestRequest(request=4, engine_id=engine, generation="g1", wait_s=3.0)
        )
        if not isinstance(reply, peer.ManifestReply):
            return f"no manifest: {reply}"
        member = next(m for m in reply.ranks if m.spec.pp_rank == 1)
        boot = scene.send_request("status", node="b")["boot"]
        made = scene.honest("spread_publish", name=engine)
        for secret in SECRETS:
            for message in _about(member, secret, boot=boot):
                is_ready = isinstance(message, peer.RankReady)
                changes = {"transfer_id": made["transfer"]} if is_ready else {}
                said = one.send_request(msgspec.structs.replace(message, **changes), 3.0)
                if isinstance(said, peer.RequestDone):
                    return f"{type(message).__name__} with the secret {secret[:10]!r} was taken"
        scene.honest("spread_ready", name=engine, transfer=made["transfer"], request=made["request"])
        came = scene.honest("pull", sink=1, ref=made["ref"], deadline_s=8.0, request=made["request"])
        return "" if came["outcome"] == "delivered" else f"the engine cannot be read any more: {came}"
    finally:
        scene.honest("spread_end", name=engine)


@attack("stranger", setup=CLEAR, limit_s=60.0)
def secrets_that_are_guessed(scene: Scene) -> str:
    """Where daemons have no keys: a member's rank is joined, left and said ready with secrets not its own."""
    return _speak_for(scene, "spread-g")


@attack("peer", limit_s=60.0)
def secrets_of_another_key(scene: Scene) -> str:
    """Where daemons have keys: the same by a peer with another admitted key."""
    return _speak_for(scene, "spread-k")


@attack("stranger", setup=CLEAR, limit_s=60.0)
def secrets_that_change(scene: Scene) -> str:
    """A member's secret changes in the middle of its life, is left out, and is 100 KB long."""
    one = scene.peer()
    manifest = _own_rank(scene, "changes", "first", one)
    if isinstance(manifest, str):
        return manifest
    for secret in SECRETS:
        for message in _about(manifest, secret):
            said = one.send_request(message, 3.0)
            if isinstance(said, peer.RequestDone):
                return f"{type(message).__name__} with the secret {secret[:10]!r} was taken"
    for secret in SECRETS[1:]:
        with_secret = _own_rank(scene, f"long-{len(secret)}-{secret[:3]}", secret, one)
        if isinstance(with_secret, str) is (len(secret) < 256):
            return f"a secret of {len(secret)} characters: {str(with_secret)[:200]}"
    for message in _about(manifest, "first"):
        one.send_request(message, 3.0)
    return ""


@attack("stranger", setup=CLEAR, fresh=True, limit_s=60.0)
def ready_without_end(scene: Scene) -> str:
    """A member is ready with transfers of names of megabytes, and with fifty thousand that never come."""
    one = scene.peer()
    manifest = _own_rank(scene, "ready-ever", "own", one)
    if isinstance(manifest, str):
        return manifest
    ready, _, leave = _about(manifest, "own")
    for number in range(50):
        one.say(
            msgspec.structs.replace(ready, request=next(NUMBERS), transfer_id=f"{number}" + "x" * 3_900_000)
        )
    for number in range(50_000):
        with suppress(zmq.ZMQError):
            content = encode(
                msgspec.structs.replace(ready, request=next(NUMBERS), transfer_id=f"never-{number}")
            )
            one.socket.send(content, zmq.NOBLOCK)
    scene.rest(6.0)
    one.say(leave)
    scene.rest(0.5)
    return ""
