"""What single steps cost, in processor time: `PYTHONPATH=. python benchmarks/costs.py`.

Messages and their checks; planning and expansion; the handshake with one large engine, of 64 ranks and 2,560
cache tensors. Each time is the least of some rounds: other load on the machine only adds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from scaling.engines import LARGE, NODE, DeploymentShape, manifest, renamed

from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.core.node import Node
from kvxferd.core.peers.manifest_checks import LayoutCache, check_manifests
from kvxferd.ids import BootId, Endpoint, GroupName, Incarnation, Rank, RegionId, TransferId
from kvxferd.layout import BlocksByGroup, EngineSpec, PackedBlocks, RankLayout, pack_ids
from kvxferd.layout.presets import attention_layout, deploy
from kvxferd.layout.validate import MAX_TENSORS, validate_layout
from kvxferd.plan import (
    Expander,
    Plan,
    block_rules,
    check_blocks,
    check_engine,
    check_request,
    decode_plan,
    encode_plan,
    make_plan,
)
from kvxferd.plan.block_list_checks import duplicate_id
from kvxferd.wire import peer
from kvxferd.wire.codec import CLIENT_MESSAGES, PEER_MESSAGES, encode
from kvxferd.wire.common import RankManifest
from kvxferd.wire.limits import MAX_REQUEST_IDS_BYTES
from kvxferd.wire.worker import Publish

ROUNDS = 7
NUM_BLOCKS = 8192

# (what, sink (tp, pp, block tokens, layout), source, tokens)
Side = tuple[int, int, int, str]
PLANS: list[tuple[str, Side, Side, int]] = [
    ("TP16 PP4 from TP8 PP1", (16, 4, 16, "HND"), (8, 1, 16, "HND"), 32_000),
    ("TP8 PP1 from TP16 PP4", (8, 1, 16, "HND"), (16, 4, 16, "HND"), 8_000),
    ("TP2 from TP4", (2, 1, 16, "HND"), (4, 1, 16, "HND"), 4_000),
    ("equal, scattered ids", (2, 1, 16, "HND"), (2, 1, 16, "HND"), 8_000),
    ("cross-layer from per-layer", (2, 1, 16, "HND-cross-layer"), (2, 1, 16, "HND"), 8_000),
    ("blocks of 12 from 16", (2, 1, 12, "HND"), (2, 1, 16, "HND"), 1_000),
    ("NHD from HND", (2, 1, 16, "NHD"), (2, 1, 16, "HND"), 125),
    ("NHD 32 from HND 16", (2, 1, 32, "NHD"), (4, 2, 16, "HND"), 125),
]


def least_ms(work: Callable[[], object], count: int = 1) -> float:
    """Return the least processor time of one call of `work`, over rounds of `count` calls."""
    least = float("inf")
    for _ in range(ROUNDS):
        began = time.thread_time()
        for _ in range(count):
            work()
        least = min(least, (time.thread_time() - began) / count)
    return 1e3 * least


def show_messages() -> None:
    """Print what messages cost, and the largest layout and block list that one may have."""
    table = Table("message", "bytes", "us to encode", "us to decode")
    for num_ranks in (0, 1, 8, 64):
        publish = Publish(
            transfer_id=TransferId("cmpl-0123456789abcdef"),
            nonce="0" * 32,
            blocks={GroupName("full"): PackedBlocks(pack_ids(range(512)))},
            num_tokens=8192,
            fence_slot=0,
            incarnations=tuple((Rank(0, tp), Incarnation(f"{tp:016x}")) for tp in range(num_ranks)),
        )
        payload = encode(publish)
        times = (
            least_ms(work, 2000)
            for work in (partial(encode, publish), partial(CLIENT_MESSAGES.decode, payload))
        )
        what = f"publish of 512 block ids, {num_ranks} ranks named"
        table.add_row(what, str(len(payload)), *(f"{1e3 * ms:.1f}" for ms in times))
    Console().print(table)
    spec = EngineSpec("e", "g", num_layers=MAX_TENSORS // 2, num_kv_heads=2)
    layout = attention_layout(
        spec=spec, num_kv_heads=2, head_dim=128, block_tokens=16, num_blocks=4, layout="HND"
    )
    ids = np.random.default_rng(0).permutation(MAX_REQUEST_IDS_BYTES // 4).astype(np.int32)
    listed = PackedBlocks(ids.tobytes())
    print(
        f"layout of {len(layout.tensors)} tensors: {least_ms(lambda: validate_layout(spec, layout)):.0f} ms"
    )
    print(
        f"{len(ids)} block ids, looked through for repeats: {least_ms(lambda: duplicate_id(listed)):.0f} ms"
    )


def scattered(block_tokens: int, num_tokens: int, seed: int) -> dict[GroupName, PackedBlocks]:
    """Return a request's list with ids at random: nothing merges along the blocks."""
    ids = np.random.default_rng(seed).permutation(NUM_BLOCKS)[: -(-num_tokens // block_tokens)]
    return {GroupName("full"): PackedBlocks(ids.astype("<i4").tobytes())}


def check_both(
    layout: RankLayout, plan: Plan, local: BlocksByGroup, published: BlocksByGroup, num_tokens: int
) -> None:
    """Check the block lists of a request, as the core does."""
    check_blocks(block_rules(layout), local, num_tokens)
    check_request(plan, local, published, num_tokens)


def show_planning() -> None:
    """Print what plans of one rank of Llama-3-70B cost, and the expansion of a request.

    `first` is the first request after a plan was made, when the rows of its shapes are computed.
    """
    heads = ("plan", "checks", "first", "expand")
    table = Table("ms", *heads, "runs", "bytes of the plan")
    for what, mine, theirs, num_tokens in PLANS:
        sink, source = (
            deploy("llama-3-70b", tp=tp, pp=pp, block_tokens=tokens, layout=layout, num_blocks=NUM_BLOCKS)
            for tp, pp, tokens, layout in (mine, theirs)
        )
        spec, layout = sink[Rank(0, 0)]
        remote = {rank: held for rank, (_, held) in source.items()}
        engines = (spec, layout, source[Rank(0, 0)][0], remote)
        plan = make_plan(*engines)
        local, published = scattered(mine[2], num_tokens, 1), scattered(theirs[2], num_tokens, 2)
        region = {RegionId("kv"): 1 << 40}
        request = (local, published, num_tokens, region, dict.fromkeys(remote, region))
        expander = Expander(plan)
        num_runs = sum(len(runs.local) for runs in expander.expand(*request).values())

        works = (
            partial(make_plan, *engines),
            partial(check_both, layout, plan, local, published, num_tokens),
            lambda plan=plan, request=request: Expander(plan).expand(*request),
            partial(expander.expand, *request),
        )
        times = (f"{least_ms(work):.3f}" for work in works)
        table.add_row(what, *times, f"{num_runs:,}", str(len(encode_plan(plan))))
    Console().print(table)


def show_handshake(shape: DeploymentShape = LARGE, reader: DeploymentShape = NODE) -> None:
    """Print what it takes to connect to an engine: its manifest is made, checked, planned and bound."""
    ranks = manifest(shape, "engine")
    reply = peer.ManifestReply(request=1, boot=BootId("far"), ranks=ranks, num_ranks=len(ranks))
    encoded = encode(reply)
    read: Any = PEER_MESSAGES.decode(encoded)
    again: Any = PEER_MESSAGES.decode(encoded)
    layouts = LayoutCache()
    remote = {rank: one.layout for rank, one in check_manifests(read.ranks, layouts)[1].items()}
    local = reader.ranks("reader")
    far_spec = read.ranks[0].spec
    packed = encode_plan(make_plan(*local[0], far_spec, remote))

    def check_known() -> None:
        found, _ = check_manifests(again.ranks, layouts)
        check_engine({rank: (one.spec, one.layout) for rank, one in found.items()})

    title = f"an engine of {len(ranks)} ranks, met by TP{reader.tp}: {len(encoded) >> 10} KiB of manifest"
    table = Table(title, "ms")
    for what, work in (
        ("aggregate at its home", partial(aggregate, joins_of(ranks, Endpoint("tcp://home:9441")))),
        ("encode", partial(encode, reply)),
        ("decode", partial(PEER_MESSAGES.decode, encoded)),
        ("check, layouts never seen", lambda: check_manifests(read.ranks, LayoutCache())),
        ("check, layouts known", check_known),
        ("plan, one rank", lambda: make_plan(*local[0], far_spec, remote)),
        ("plan, all ranks of the node", lambda: [make_plan(*one, far_spec, remote) for one in local]),
        (f"bind in the mover, {len(packed)} bytes of plan", lambda: Expander(decode_plan(packed))),
    ):
        table.add_row(what, f"{least_ms(work):.2f}")
    Console().print(table)


def joins_of(ranks: tuple[RankManifest, ...], home: Endpoint) -> list[peer.JoinRank]:
    """Return what daemons of eight ranks each send to the home of their engine."""
    return [
        peer.JoinRank(
            request=number,
            boot=BootId(f"member-{number // 8}"),
            manifest=msgspec.structs.replace(one, spec=renamed(one.spec, "engine", home)),
            secret="s" * 16,
        )
        for number, one in enumerate(ranks)
    ]


def aggregate(joins: list[peer.JoinRank]) -> None:
    """Have every rank join an engine's home from other nodes, and a peer fetch the whole."""
    spec = joins[0].manifest.spec
    node = Node(boot=BootId("home"), endpoint=spec.home, new_token=lambda: "0" * 32)
    for join in joins:
        node.feed(ev.PeerRequest(join.boot.encode(), join), 1.0)
    fetch = peer.ManifestRequest(request=1, engine_id=spec.engine_id, generation=spec.generation, wait_s=1.0)
    effects = node.feed(ev.PeerRequest(b"reader", fetch), 1.0)
    replies = [effect.message for effect in effects if isinstance(effect, fx.ReplyToPeer)]
    if [len(reply.ranks) for reply in replies if isinstance(reply, peer.ManifestReply)] != [len(joins)]:
        raise AssertionError("the home did not hand the engine out")


if __name__ == "__main__":
    show_messages()
    show_planning()
    show_handshake()
