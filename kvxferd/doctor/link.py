"""Measures the link between two nodes by pulls, as engines make them.

`kvxferd doctor --serve` on one node registers an engine with the daemon there and publishes its blocks;
`kvxferd doctor --peer ENDPOINT --ref REF` on the other one registers an engine, pulls them, and checks every
byte. The reference is the right to read, and a command line is no secret on its node. So the blocks hold
nothing but a hash of their coordinates, and only daemons that the serving one admits can read them.
"""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http import HTTPStatus
from typing import Any

import numpy as np

from kvxferd import client
from kvxferd.doctor.network import rdma_cards
from kvxferd.doctor.report import CheckContext, Finding, Verdict, fail, ok, warn
from kvxferd.errors import Code, ConfigError, KvxferdError
from kvxferd.ids import Endpoint
from kvxferd.layout.presets import LayerKind, ModelFacts, deploy, key_and_value
from kvxferd.telemetry.remedies import remedy_of
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
# For a failed measurement, where it differs from what a failing pull calls for.
LINK_REMEDIES = {
    **dict.fromkeys((Code.DEADLINE, Code.TRANSPORT), _OPEN_PORTS),
    **dict.fromkeys(
        (Code.TRANSFER_UNKNOWN, Code.NONCE_WRONG, Code.ENGINE_UNKNOWN, Code.GENERATION_STALE,
         Code.RELEASED, Code.LEASE_EXPIRED, Code.LAYOUT_INCOMPATIBLE, Code.TOKENS_NOT_PUBLISHED),
        _SERVE_AGAIN,
    ),
}  # fmt: skip


def serve_link(
    node: CheckContext, on_published: Callable[[client.TransferRef], None], for_s: float = SERVE_S
) -> None:
    """Publish blocks for `measure_link` until KeyboardInterrupt, at most for `for_s` seconds.

    `on_published` gets their reference, and another one whenever they were released, as by
    `kvxferd cancel`. In the end the transfer is withdrawn and the engine gone. Raises KvxferdError if the
    daemon does not take them.
    """
    ends_at = time.monotonic() + for_s
    with _registered_rank(node, _new_engine_id()) as rank:
        rank.write(REQUEST)
        while True:
            name, left_s = secrets.token_hex(4), max(0.0, ends_at - time.monotonic())
            # The lease does not end first: that would count as a transfer which nobody read in time.
            ref = rank.publish(name, REQUEST, num_readers=NUM_READERS, lease_s=left_s + 2 * WITHDRAW_S)
            try:
                on_published(ref)
                rank.await_release([name], left_s)
            except KeyboardInterrupt:
                break
            except KvxferdError as error:
                if error.code is not Code.DEADLINE:
                    raise
                break
        with suppress(KvxferdError):  # a reader is there still, or no daemon: the session's end releases it
            rank.unpublish(ref)
            rank.await_release([name], WITHDRAW_S)


def not_measured() -> Finding:
    """Return how to have the reference that `measure_link` needs."""
    todo = "run `kvxferd doctor --serve` there, and here the command that it prints"
    return Finding(check=CHECK, verdict=Verdict.OK, found="not measured", todo=todo)


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
            yield judge(pulls, _ways(node, engine_id), _transports(node, engine_id))
    except KvxferdError as error:
        usual = remedy_of(error.code, Endpoint(ref.endpoint), node.config_path)
        todo = LINK_REMEDIES.get(error.code, usual)
        yield fail(
            CHECK, f"{error.message} [{error.code.value}]", todo, essential=True, code=error.code.value
        )


def judge(pulls: list[Pulled], ways: dict[str, int], transports: dict[str, Any]) -> Finding:
    """Return the finding on pulls whose bytes are right. `transports`: of `/v1/engines`, {} if not known."""
    first, *others = pulls
    speeds = [pull.bytes / pull.wire_s / 1e9 for pull in others]
    lanes, reach = transports.get("lanes", ""), transports.get("reach", "")
    facts = {
        "gigabytes_per_s": statistics.median(speeds),
        "best_gigabytes_per_s": max(speeds),
        "first_s": first.elapsed_s,
        "bytes": first.bytes,
        "pulls": len(pulls),
        "ways": ways,
        "transports": lanes,
        "reach": reach,
    }
    read = ", ".join(way for way, num_bytes in ways.items() if num_bytes) or "in a way that is not known"
    where = {"node": " within one machine", "network": " over the network"}.get(reach, "")
    found = (
        f"{facts['gigabytes_per_s']:.3g} GB/s (median of {len(speeds)} pulls of {format_size(first.bytes)}, "
        f"{max(speeds):.3g} at best), read {read} by {lanes or 'unknown transports'}{where}; "
        f"every byte is right; the first pull took {format_time(first.elapsed_s)}"
    )
    if transports.get("slow"):
        todo = f"let the daemons read from each other's processes (one user, one PID namespace): {SLOW_PATH}"
        return warn(CHECK, f"{found}; a faster way exists on this machine", todo, **facts)
    if reach == "network" and lanes == "tcp" and (cards := rdma_cards()):
        todo = f"let movers use {', '.join(card.name for card in cards)} on both nodes: {SLOW_PATH}"
        return warn(CHECK, f"{found}, although there is an RDMA card here", todo, **facts)
    return ok(CHECK, found, **facts)


def _ways(node: CheckContext, engine_id: str) -> dict[str, int]:
    """Return how many bytes were read in each way."""
    ways = Counter[str]()
    for record in node.daemon.get(f"/v1/history?kind=pull&engine={engine_id}")["records"]:
        ways.update(record.get("ways", {}))
    return dict(ways)


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
        status, _ = node.daemon.request("GET", f"/v1/engines/{engine_id}/layouts")
        if status == HTTPStatus.NOT_FOUND:
            raise ConfigError(
                f"cannot measure: {node.config.worker.socket} and {node.daemon.socket_path} are sockets of "
                "two daemons; name the one's configuration with --config"
            )
        yield rank
