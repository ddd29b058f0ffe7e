"""A remote engine as one local rank knows it: an entry of the registry in `kvxferd.plan.topology`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import msgspec

from kvxferd.errors import Code, EngineError
from kvxferd.ids import Digest, Endpoint, EngineId, Generation, Rank
from kvxferd.layout import EngineSpec, RankLayout, digest_of
from kvxferd.plan.engine_checks import RANK_FIELDS
from kvxferd.plan.transfer_info import EngineTransferInfo


class RemoteManifest(Protocol):
    """A remote engine's manifest, of which the registry needs the spec and the layouts."""

    @property
    def spec(self) -> EngineSpec:
        """The spec of its first rank."""

    @property
    def layouts_digest(self) -> Digest:
        """What `digest_of_layouts` returns of its layouts."""

    def layouts(self) -> Mapping[Rank, RankLayout]:
        """Return the layout of each rank."""


def digest_of_layouts(digests: Mapping[Rank, Digest]) -> Digest:
    """Return the digest of an engine's layouts, from the digest of each rank's."""
    return digest_of(tuple((rank, digests[rank]) for rank in sorted(digests)))


@dataclasses.dataclass(slots=True, eq=False)
class RegisteredEngine:
    """One remote engine as one local rank knows it."""

    home: Endpoint  # the peer whose daemon sent its manifest
    spec: EngineSpec  # of its first rank
    layouts_digest: Digest  # of the layouts of all its ranks
    stages: dict[int, EngineTransferInfo]  # by pp_rank, the lowest first
    source_bits: dict[int, int]  # by pp_rank: bit n is set where the rank of tp_rank n is read
    last_used: float  # seconds of the caller's clock

    @property
    def engine_id(self) -> EngineId:
        """Return the engine's id."""
        return self.spec.engine_id

    @property
    def generation(self) -> Generation:
        """Return the generation that is registered."""
        return self.spec.generation

    def require_same_facts(self, remote: RemoteManifest) -> None:
        """Raise EngineError (shape-mismatch) for another spec, field by field, or other layouts.

        Bindings are no facts: each mapping of the memory changes them.
        """
        if self.layouts_digest == remote.layouts_digest and self.spec == remote.spec:
            return  # nearly always, at each grant
        before, after = (msgspec.structs.asdict(one.spec) for one in (self, remote))
        before["the digest of its ranks' layouts"] = self.layouts_digest
        after["the digest of its ranks' layouts"] = remote.layouts_digest
        differing = [name for name in before if name not in RANK_FIELDS and before[name] != after[name]]
        if differing:
            listed = "; ".join(f"{name} was {before[name]!r} and is {after[name]!r}" for name in differing)
            raise EngineError(
                f"cannot register other facts for engine {self.engine_id!r}, under one generation: {listed}; "
                "an engine whose facts change starts with a new generation",
                Code.SHAPE_MISMATCH,
            )
