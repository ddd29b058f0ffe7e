"""Engines to simulate with: a model in some deployment, as the manifest of a daemon that does not exist."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvxferd.ids import AgentName, Endpoint, EngineId, Generation, GroupName, Incarnation, Rank
from kvxferd.layout import EngineSpec, PackedBlocks, RankLayout, pack_ids
from kvxferd.layout.presets import MODELS, deploy
from kvxferd.wire.common import Binding, RankManifest, RegionAddress

GROUP = GroupName("full")
NUM_BLOCKS = 8192
BLOCK_TOKENS = 16
# A host region costs 44 bytes of NIXL metadata and the agent itself 331; each of eight NICs' keys adds more.
METADATA_BYTES = 1024


@dataclass(frozen=True)
class DeploymentShape:
    """How a model is deployed."""

    tp: int
    pp: int = 1
    model: str = "llama-3-70b"
    layout: str = "HND"

    @property
    def num_ranks(self) -> int:
        """The number of ranks of one engine."""
        return self.tp * self.pp

    def ranks(self, engine_id: str, home: str = "") -> list[tuple[EngineSpec, RankLayout]]:
        """Return every rank's spec and layout, stage by stage."""
        deployed = deploy(
            MODELS[self.model],
            tp=self.tp,
            pp=self.pp,
            block_tokens=BLOCK_TOKENS,
            layout=self.layout,
            num_blocks=NUM_BLOCKS,
        )
        return [
            (renamed(spec, engine_id, home), layout)
            for spec, layout in (deployed[rank] for rank in sorted(deployed))
        ]


NODE = DeploymentShape(tp=8)  # an engine that fills a node
LARGE = DeploymentShape(tp=16, pp=4)  # 80 layers on eight nodes


def renamed(spec: EngineSpec, engine_id: str, home: str = "") -> EngineSpec:
    """Return the same rank of an engine of another name."""
    return msgspec.structs.replace(
        spec, engine_id=EngineId(engine_id), generation=Generation("g1"), home=Endpoint(home)
    )


def manifest(shape: DeploymentShape, engine_id: str) -> tuple[RankManifest, ...]:
    """Return the manifest that an engine's home sends."""
    return tuple(
        RankManifest(spec, layout, binding(engine_id, spec.rank, layout))
        for spec, layout in shape.ranks(engine_id)
    )


def binding(engine_id: str, rank: Rank, layout: RankLayout) -> Binding:
    """Return addresses, agent name and metadata as a mover would make them."""
    return Binding(
        agent=AgentName(f"{engine_id}/{rank.pp_rank}-{rank.tp_rank}"),
        metadata=bytes(METADATA_BYTES),
        regions=tuple(
            RegionAddress(region.region, (1 << 40) + (number << 38), region.size_bytes)
            for number, region in enumerate(layout.regions)
        ),
        incarnation=Incarnation("0123456789abcdef"),
    )


def block_ids_of(num_tokens: int, first: int = 0) -> list[int]:
    """Return the blocks of a request: neighbours, from block `first` on."""
    number = -(-num_tokens // BLOCK_TOKENS)
    start = first % (NUM_BLOCKS - number)
    return list(range(start, start + number))


def blocks_of(num_tokens: int) -> dict[GroupName, PackedBlocks]:
    """Return a request's block list as it is sent."""
    return {GROUP: PackedBlocks(pack_ids(block_ids_of(num_tokens)))}
