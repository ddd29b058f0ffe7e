"""Measures the link between two nodes by pulls, as engines make them.

`kvxferd doctor --serve` on one node registers an engine with the daemon there and publishes its blocks;
`kvxferd doctor --link REF` on the other one registers an engine, pulls them, and checks every byte. The
reference is the right to read, and a command line is no secret on its node. So the blocks hold nothing but a
hash of their coordinates, and only daemons that the serving one admits can read them.
"""

from __future__ import annotations

import os
import secrets
import statistics
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import numpy as np

from kvxferd import client
from kvxferd.doctor.network import rdma_cards
from kvxferd.doctor.ping import Outcome, ping, read_identity
from kvxferd.doctor.report import CheckContext, Finding, Verdict, fail, ok, warn
from kvxferd.errors import Code, ConfigError, KvxferdError
from kvxferd.ids import Endpoint
from kvxferd.layout.presets import LayerKind, ModelFacts, deploy, key_and_value
from kvxferd.telemetry.units import format_size, format_time
from kvxferd.tooling.content import RequestBlocks
from kvxferd.tooling.engine_process import EngineRank, Pulled
from kvxferd.wire.common import TransferRef

# 1,024 tokens of 64 KiB: 64 MiB, which take 5 ms at 12 GB/s.
MODEL = ModelFacts("doctor", 8, (LayerKind.FULL,) * 16, key_and_value(8, 128))
BLOCK_TOKENS, NUM_BLOCKS = 16, 64
REQUEST = RequestBlocks(1, {"full": np.arange(NUM_BLOCKS, dtype=np.int32)}, BLOCK_TOKENS * NUM_BLOCKS)

NUM_PULLS = 8  # the first connects, and does not measure the link
# A server that was forgotten costs its node 64 MiB and a mover, and not for longer.
SERVE_S = 1800.0
WITHDRAW_S = 10.0
# Each measurement is a reader of its own, and none is the last: the transfer stays for the next one.
NUM_READERS = 1 << 20

CHECK = "link"
SLOW_PATH = "docs/how-to/when-something-is-wrong.md"
_OPEN_PORTS = "movers reach each other on ports of their own: open TCP between the nodes, both ways"
_SERVE_AGAIN = "run `kvxferd doctor --serve` there again, and here the command that it prints"


def serve_link(
    node: CheckContext, on_published: Callable[[client.TransferRef], None], for_s: float = SERVE_S
) -> None:
    """Publish blocks for `measure_link` until they are released, KeyboardInterrupt, or `for_s` seconds.

    `on_published` gets their reference. In the end the transfer is withdrawn and the engine gone. Raises
    KvxferdError if the daemon does not take them.
    """
    name = secrets.token_hex(4)
    with _registered_rank(node, _new_engine_id()) as rank:
        rank.write(REQUEST)
        # The lease does not end first: that would count as a transfer which nobody read in time.
        ref = rank.publish(name, REQUEST, num_readers=NUM_READERS, lease_s=for_s + 2 * WITHDRAW_S)
        try:
            on_published(ref)
            rank.await_release([name], for_s)
        except (KeyboardInterrupt, KvxferdError) as error:
            if isinstance(error, KvxferdError) and error.code is not Code.DEADLINE:
                raise
            with suppress(KvxferdError):  # a reader is there still: the session's end releases it
                rank.unpublish(ref)
                rank.await_release([name], WITHDRAW_S)


def check_link(node: CheckContext, ref: TransferRef) -> Iterator[Finding]:
    """Yield whether the daemon of a `serve_link` is reached, and what pulls of its blocks find."""
    reach = _reach(node, Endpoint(ref.endpoint))
    yield reach
    if reach.verdict is not Verdict.FAIL:
        yield from measure_link(node, ref)


def _reach(node: CheckContext, peer: Endpoint) -> Finding:
    try:
        allowlist, key = read_identity(node.config.peer)
    except KvxferdError as error:
        return warn("reach", f"not tried: {error.message}", "run doctor as root or as the daemon's user")
    result = ping(peer, allowlist, key)
    if result.outcome is not Outcome.OK:
        return fail("reach", result.message, result.remedy, essential=True, outcome=result.outcome.value)
    return ok("reach", f"{result.message}; round trip {format_time(result.median_s)}")


def measure_link(node: CheckContext, ref: TransferRef) -> Iterator[Finding]:
    """Yield what pulls of the blocks of a `serve_link` find: speed, way and transports, or wrong bytes."""
    engine_id = _new_engine_id()
    pulls: list[Pulled] = []
    try:
        with _registered_rank(node, engine_id) as rank:
            for _ in range(NUM_PULLS):
                rank.store.bytes[:] = 0  # else a pull that writes nothing would pass
                pulls.append(rank.pull(ref, REQUEST))
                check = rank.check(REQUEST)
                if check.wrong_items:
                    found = f"{check.wrong_items:,} of {check.checked_items:,} items are wrong"
                    found += f", the first: {check.first_wrong}"
                    todo = "do not use this link: a daemon or its network card is broken"
                    yield fail(CHECK, found, todo, essential=True, wrong_items=check.wrong_items)
                    return
            yield judge(pulls, _transports(node, engine_id))
    except KvxferdError as error:
        todo = _OPEN_PORTS if error.code in (Code.DEADLINE, Code.TRANSPORT) else _SERVE_AGAIN
        found = f"{error.message} [{error.code.value}]"
        yield fail(CHECK, found, todo, essential=True, code=error.code.value)


def judge(pulls: list[Pulled], transports: dict[str, Any]) -> Finding:
    """Return the finding on pulls whose bytes are right. `transports`: of `/v1/engines`, {} if not known."""
    first, *others = pulls
    speeds = [pull.bytes / pull.wire_s / 1e9 for pull in others]
    lanes, reach = transports.get("lanes", ""), transports.get("reach", "")
    facts = {
        "gigabytes_per_s": statistics.median(speeds),
        "bytes": first.bytes,
        "pulls": len(pulls),
        "transports": lanes,
        "reach": reach,
    }
    where = {"node": " within one machine", "network": " over the network"}.get(reach, "")
    found = (
        f"{facts['gigabytes_per_s']:.3g} GB/s (median of {len(speeds)} pulls of {format_size(first.bytes)}, "
        f"{max(speeds):.3g} at best) by {lanes or 'unknown transports'}{where}; every byte is right; the "
        f"first pull took {format_time(first.elapsed_s)}"
    )
    if transports.get("slow"):
        todo = f"let the daemons read from each other's processes (one user, one PID namespace): {SLOW_PATH}"
        return warn(CHECK, f"{found}; a faster way exists on this machine", todo, **facts)
    if reach == "network" and lanes == "tcp" and (cards := rdma_cards()):
        todo = f"let movers use {', '.join(card.name for card in cards)} on both nodes: {SLOW_PATH}"
        return warn(CHECK, f"{found}, although there is an RDMA card here", todo, **facts)
    return ok(CHECK, found, **facts)


def _transports(node: CheckContext, engine_id: str) -> dict[str, Any]:
    """Return the transports over which the engine's mover connected to another process; {}: not known."""
    for engine in node.daemon.get("/v1/engines")["engines"]:
        if engine["engine_id"] == engine_id:
            used = [one for rank in engine["ranks"] for one in rank["lanes"] if one["reach"] != "itself"]
            return dict(used[-1]) if used else {}
    return {}


def _new_engine_id() -> str:
    # Its own each time: an engine's id belongs to its user for a while after the engine is gone.
    return f"doctor-{secrets.token_hex(4)}"


@contextmanager
def _registered_rank(node: CheckContext, engine_id: str) -> Iterator[EngineRank]:
    """Give an engine of one rank. Raises KvxferdError if the daemon is not there or refuses it."""
    node.daemon.get("/v1/status")  # a daemon that is down is reported at once, and not after a timeout
    deployment = deploy(
        MODEL, layout="HND", block_tokens=BLOCK_TOKENS, num_blocks=NUM_BLOCKS, engine_id=engine_id
    )
    ((spec, layout),) = deployment.values()
    # `--socket` names a control socket alone: the worker socket may be another daemon's, or nobody's.
    if not os.path.exists(node.config.worker.socket):
        raise ConfigError(
            f"cannot measure: there is no {node.config.worker.socket}, where engines register; name the "
            "daemon's configuration with --config"
        )
    with closing(EngineRank()) as rank:
        rank.register(node.config.worker.socket, spec, layout)
        yield rank
