"""Topologies of local ranks with a remote engine registered, and what is shown of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvxferd.core.topology_builder import TopologyListing, topology_steps
from kvxferd.core.topology_snapshot import TopologySnapshot
from kvxferd.ids import Endpoint, EngineId, Rank
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.layout.presets import ModelFacts, deploy
from kvxferd.plan import TransferTopology

REMOTE = EngineId("prefill-0")
HOME = Endpoint("tcp://10.0.0.2:9441")
REGISTERED_AT = 100.0
FIRST = Rank(0, 0)


class RegisteredPair(NamedTuple):
    """A local rank's topology, and the layouts of the engine that is registered with it."""

    topology: TransferTopology
    remote_spec: EngineSpec
    remote: Mapping[Rank, RankLayout]


def registered(
    model: ModelFacts | str,
    tp: int,
    remote_tp: int,
    rank: Rank = FIRST,
    *,
    local: Mapping[str, Any] | None = None,
    remote: Mapping[str, Any] | None = None,
) -> RegisteredPair:
    """Deploy a model twice, and register the second engine with one rank of the first."""
    topology = TransferTopology(*deploy(model, tp=tp, engine_id="decode-0", **(local or {}))[rank])
    source = deploy(model, tp=remote_tp, engine_id=REMOTE, **(remote or {}))
    layouts = {where: held for where, (_, held) in source.items()}
    spec = source[FIRST][0]
    topology.register_remote_ranks(spec, layouts, home=HOME, now=REGISTERED_AT)
    return RegisteredPair(topology, spec, layouts)


def shown(pair: RegisteredPair, now: float = REGISTERED_AT) -> TopologySnapshot:
    """What is shown of the registered engine."""
    engine = pair.topology.find(pair.remote_spec.engine_id)

    def result() -> Iterator[TopologySnapshot | None]:
        yield (yield from topology_steps(pair.topology, engine, now))

    (snapshot,) = (step for step in result() if step is not None)
    return snapshot


def sample_topologies() -> list[TopologySnapshot]:
    """A hybrid, and a pair in two stages whose sizes do not divide."""
    uneven = registered(
        "tiny-dense", 3, 2, Rank(0, 1), local={"block_tokens": 16}, remote={"pp": 2, "block_tokens": 24}
    )
    return [shown(registered("tiny-mamba2", 1, 2), 112.5), shown(uneven, 103.25)]


def listing_of(topologies: list[TopologySnapshot]) -> TopologyListing:
    """These topologies, with a pause before each."""

    def steps() -> Iterator[TopologySnapshot | None]:
        for one in topologies:
            yield None
            yield one

    return TopologyListing(len(topologies), steps())
