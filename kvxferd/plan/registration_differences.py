"""Why facts of a remote engine are refused: what differs from those registered, or contradicts itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import msgspec

from kvxferd.errors import Code, EngineError, PlanError
from kvxferd.ids import Digest, Rank
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.plan.engine_checks import RANK_FIELDS
from kvxferd.plan.plan import Plan
from kvxferd.plan.registered_engine import RegisteredEngine
from kvxferd.plan.transfer_info import EngineTransferInfo, stage_infos

MAX_LISTED_DIFFERENCES = 32  # in an error message: an engine has up to 64 stages


def require_reads_inside(plan: Plan, remote: EngineSpec, layers: Mapping[int, tuple[int, int]]) -> None:
    """Raise PlanError (layers-missing) for a tensor that is read outside the layers of its stage."""
    for read in plan.group_reads:
        start, end = layers.get(read.rank.pp_rank, (0, 0))
        for pattern in read.patterns:
            for extent in pattern.extents:
                if not start <= extent.layer < end:
                    raise PlanError(
                        f"cannot read engine {remote.key}: rank {read.rank} holds component "
                        f"{extent.component!r} of layer {extent.layer}, and its stage the layers "
                        f"[{start}, {end})",
                        Code.LAYERS_MISSING,
                    )


def require_same_facts(
    known: RegisteredEngine, spec: EngineSpec, ranks: Mapping[Rank, RankLayout], digest: Digest
) -> None:
    """Refuse another spec, field by field, or other layouts than those registered. Bindings are no facts."""
    before, after = msgspec.structs.asdict(known.spec), msgspec.structs.asdict(spec)
    differing = [
        f"{name} was {before[name]!r} and is {after[name]!r}"
        for name in before
        if name not in RANK_FIELDS and before[name] != after[name]
    ]
    infos = stage_infos(spec, ranks)
    for pp_rank, info in known.stages.items():
        differing += _differing_fields(info, infos.get(pp_rank))
    if known.layouts_digest != digest:
        differing.append(f"the digest of its ranks' layouts was {known.layouts_digest} and is {digest}")
    if differing:
        more = len(differing) - MAX_LISTED_DIFFERENCES
        listed = "; ".join(differing[:MAX_LISTED_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
        raise EngineError(
            f"cannot register other facts for engine {known.engine_id!r}, under one generation: {listed}; "
            "an engine whose facts change starts with a new generation",
            Code.SHAPE_MISMATCH,
        )


def _differing_fields(known: EngineTransferInfo, new: EngineTransferInfo | None) -> list[str]:
    """Return each fact of a stage that differs from the registered one, with both values."""
    if new is None:
        return [f"stage {known.remote_pp_rank} was one of its stages"]
    return [
        f"{field.name} was {getattr(known, field.name)} and is {getattr(new, field.name)}"
        for field in dataclasses.fields(EngineTransferInfo)
        if getattr(known, field.name) != getattr(new, field.name)
    ]
