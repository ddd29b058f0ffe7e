"""Requests between ranks of a fleet, published and pulled byte for byte."""

from __future__ import annotations

import random
from typing import Any

from kvxferd.layout import EngineSpec
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.rank_process import RankProcess

TOKENS = 500


def spec_of(name: str, **facts: Any) -> EngineSpec:
    return EngineSpec(name, "g1", num_layers=4, num_kv_heads=8, **facts)


def ids_for(seed: int, block_tokens: int = 16) -> list[int]:
    return random.Random(seed).sample(range(64), -(-TOKENS // block_tokens))


def publish(sources: list[RankProcess], request: int, block_tokens: int = 16) -> dict[str, Any]:
    ids = ids_for(request, block_tokens)
    for source in sources:
        source.write(request, ids, TOKENS)
    ref = sources[0].publish(f"req-{request}", ids, TOKENS)
    for source in sources[1:]:
        source.ready(f"req-{request}")
    return ref


def pull_and_check(
    sinks: list[RankProcess], ref: dict[str, Any], request: int, block_tokens: int = 16
) -> None:
    ids = ids_for(1000 + request, block_tokens)
    tickets = [sink.pull(ref, ids, TOKENS) for sink in sinks]
    for sink, ticket in zip(sinks, tickets, strict=True):
        name, fields = sink.end_of(ticket)
        assert name == "Delivered", fields
        assert fields["bytes"] > 0
        assert sink.num_wrong(request, ids, TOKENS) == 0
        assert sink.num_spilled(ids) == 0


def rank_shown(daemon: Daemon, engine_id: str) -> dict[str, Any]:
    """The first rank of an engine in the daemon's status; {} while the engine is not there."""
    engines = [e for e in daemon.status()["engines"] if e["engine_id"] == engine_id]
    return engines[0]["ranks"][0] if engines else {}
