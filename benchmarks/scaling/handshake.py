"""The cost of connecting to one large engine: its manifest is made, fetched, checked, planned and bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.core.node import Node
from kvxferd.core.peers.layout_cache import LayoutCache
from kvxferd.core.peers.manifest_checks import check_manifests
from kvxferd.core.peers.remote_engine import RemoteEngine
from kvxferd.ids import BootId, Endpoint
from kvxferd.plan import (
    Expander,
    PlannedReads,
    TransferTopology,
    check_engine,
    decode_plan,
    digest_of_layouts,
    encode_plan,
    make_plan,
)
from kvxferd.wire import peer
from kvxferd.wire.codec import PEER_MESSAGES, encode
from scaling.engines import LARGE, METADATA_BYTES, NODE, DeploymentShape, manifest, renamed

ROUNDS = 7
HOME = Endpoint("tcp://far:9441")


@dataclass(frozen=True)
class HandshakeResult:
    """Milliseconds unless named otherwise; of one engine."""

    shape: DeploymentShape
    reader: DeploymentShape
    num_ranks: int
    num_tensors: int
    manifest_bytes: int
    metadata_bytes: int  # of NIXL, per rank, within that: assumed
    aggregate_ms: float  # at its home: every rank joins, and one peer fetches
    encode_ms: float
    fetch_ms: float  # encoded bytes over a ZMQ pair on this machine
    decode_ms: float
    check_ms: float  # layouts that are not in the cache
    check_again_ms: float  # of an engine whose layouts are in the cache
    plan_ms: float  # of one rank of the reader
    plan_all_ms: float  # of all ranks of the reader's node
    plan_known_ms: float  # of one rank, that is registered
    plan_bytes: int
    bind_ms: float  # a mover decodes the plan and is ready to expand it
    num_sources: int  # remote ranks that one rank reads


def measure(shape: DeploymentShape = LARGE, reader: DeploymentShape = NODE) -> HandshakeResult:
    """Connect to one engine. Each time is the shortest of some rounds, except the first check and plan."""
    ranks = manifest(shape, "engine")
    reply = peer.ManifestReply(request=1, boot=BootId("far"), ranks=ranks, num_ranks=len(ranks))
    encoded = encode(reply)
    read = PEER_MESSAGES.decode(encoded)
    assert isinstance(read, peer.ManifestReply)
    layouts = LayoutCache()
    check_ms = _once_ms(lambda: check_manifests(read.ranks, layouts))
    ranks_there, checked = check_manifests(read.ranks, layouts)
    remote = {rank: one.layout for rank, one in checked.items()}
    digest = digest_of_layouts({rank: one.digest for rank, one in checked.items()})
    engine = RemoteEngine(read.ranks[0].spec, ranks_there, digest)
    again = PEER_MESSAGES.decode(encoded)
    assert isinstance(again, peer.ManifestReply)
    local = reader.ranks("reader")
    spec, layout = local[0]
    plan = make_plan(spec, layout, read.ranks[0].spec, remote)
    packed = encode_plan(plan)
    reads, topologies = PlannedReads((), plan), [TransferTopology(s, y) for s, y in local]

    def check_known() -> None:
        found, _ = check_manifests(again.ranks, layouts)
        check_engine({rank: (one.spec, one.layout) for rank, one in found.items()})

    return HandshakeResult(
        shape=shape,
        reader=reader,
        num_ranks=len(ranks),
        num_tensors=sum(len(one.layout.tensors) for one in ranks),
        manifest_bytes=len(encoded),
        metadata_bytes=METADATA_BYTES,
        aggregate_ms=min(_aggregate_ms(shape) for _ in range(3)),
        encode_ms=_best_ms(lambda: encode(reply)),
        fetch_ms=_fetch_ms(encoded),
        decode_ms=_best_ms(lambda: PEER_MESSAGES.decode(encoded)),
        check_ms=check_ms,
        check_again_ms=_best_ms(check_known),
        plan_ms=_best_ms(lambda: make_plan(spec, layout, read.ranks[0].spec, remote)),
        plan_all_ms=_once_ms(lambda: [one.plan_remote_engine(engine, home=HOME) for one in topologies]),
        plan_known_ms=_best_ms(
            lambda: topologies[0].register_remote_engine(engine, lambda _: reads, home=HOME)
        ),
        plan_bytes=len(packed),
        bind_ms=_best_ms(lambda: Expander(decode_plan(packed))),
        num_sources=len(plan.sources),
    )


def _aggregate_ms(shape: DeploymentShape) -> float:
    """Have every rank join an engine's home from other nodes, and a peer fetch the whole."""
    home = Endpoint("tcp://home:9441")
    node = Node(boot=BootId("home"), endpoint=home, new_token=lambda: "0" * 32)
    joins = [
        ev.PeerRequest(
            f"member-{number // 8}".encode(),
            peer.JoinRank(
                request=number,
                boot=BootId(f"member-{number // 8}"),
                manifest=msgspec.structs.replace(one, spec=renamed(one.spec, "engine", home)),
                secret="s" * 16,
            ),
        )
        for number, one in enumerate(manifest(shape, "engine"))
    ]
    spec = renamed(joins[0].message.manifest.spec, "engine", home)  # type: ignore[union-attr]
    fetch = peer.ManifestRequest(request=1, engine_id=spec.engine_id, generation=spec.generation, wait_s=1.0)
    began = time.thread_time()
    for join in joins:
        node.feed(join, 1.0)
    effects = node.feed(ev.PeerRequest(b"reader", fetch), 1.0)
    spent = time.thread_time() - began
    replied = [
        e for e in effects if isinstance(e, fx.ReplyToPeer) and isinstance(e.message, peer.ManifestReply)
    ]
    if len(replied) != 1 or len(replied[0].message.ranks) != shape.num_ranks:  # type: ignore[attr-defined]
        raise AssertionError("the home did not hand the engine out")
    return 1e3 * spent


def _fetch_ms(encoded: bytes) -> float:
    """Return the shortest round trip of a request and this reply, through a ROUTER and a DEALER over TCP."""
    context = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    try:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        dealer.connect(f"tcp://127.0.0.1:{port}")

        def exchange() -> None:
            dealer.send(b"fetch")
            route, _ = router.recv_multipart()
            router.send_multipart([route, encoded])
            dealer.recv()

        return _best_ms(exchange)
    finally:
        router.close(linger=0)
        dealer.close(linger=0)
        context.term()


def _once_ms(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


def _best_ms(work: Callable[[], object]) -> float:
    return min(_once_ms(work) for _ in range(ROUNDS))
