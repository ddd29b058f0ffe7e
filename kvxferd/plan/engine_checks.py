"""Checks that ranks form an engine: all state the same engine, and the stages together hold every layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from kvxferd.errors import Code, EngineError, NotPPAwareError
from kvxferd.ids import Rank
from kvxferd.layout import EngineSpec, RankLayout

RankKey = TypeVar("RankKey", bound=tuple[int, int])  # (pp_rank, tp_rank)

# The fields of EngineSpec that differ from rank to rank; all others are the engine's.
RANK_FIELDS = {"pp_rank", "tp_rank"}
MAX_LISTED_RANKS = 8  # in an error message


def check_same_engine(known: EngineSpec, new: EngineSpec) -> None:
    """Raise EngineError unless both ranks state the same engine.

    The code is unequal-stages where pipeline stages differ in tensor-parallel size, else
    shape-mismatch; the message lists every field that differs with both values.
    """
    mine, theirs = msgspec.structs.asdict(known), msgspec.structs.asdict(new)
    differing = [name for name in mine if name not in RANK_FIELDS and mine[name] != theirs[name]]
    if not differing:
        return
    unequal = "tp_size" in differing and known.pp_rank != new.pp_rank
    listed = "; ".join(
        f"{name} is {mine[name]!r} on {known.rank} and {theirs[name]!r} on {new.rank}" for name in differing
    )
    raise EngineError(
        f"cannot add rank {new.rank} to engine {known.key}: {listed}",
        Code.UNEQUAL_STAGES if unequal else Code.SHAPE_MISMATCH,
    )


def check_engine(ranks: Mapping[Rank, tuple[EngineSpec, RankLayout]]) -> None:
    """Raise EngineError unless the ranks are a whole engine, and hold its layers together, each exactly once.

    The code is engine-incomplete where ranks are missing; that of `check_same_engine` for ranks that state
    different engines; layers-missing where the ranks of a stage differ in their layers, or the stages overlap
    or leave layers out.
    """
    spec = ranks[min(ranks)][0]
    for rank in sorted(ranks):
        check_same_engine(spec, ranks[rank][0])
    lacking = [rank for rank in spec.ranks() if rank not in ranks]
    if lacking:
        more = f" and {len(lacking) - MAX_LISTED_RANKS} more" if len(lacking) > MAX_LISTED_RANKS else ""
        raise EngineError(
            f"cannot use engine {spec.key}: of its {spec.pp_size} x {spec.tp_size} ranks it lacks "
            + ", ".join(map(str, lacking[:MAX_LISTED_RANKS]))
            + more,
            Code.ENGINE_INCOMPLETE,
        )
    expected = 0
    for rank in spec.ranks():
        start, end = ranks[rank][1].start_layer, ranks[rank][1].end_layer
        first = ranks[Rank(rank.pp_rank, 0)][1]
        if (start, end) != (first.start_layer, first.end_layer):
            raise _layers_missing(
                spec,
                f"rank {Rank(rank.pp_rank, 0)} holds layers [{first.start_layer}, {first.end_layer}) and "
                f"rank {rank} of its stage [{start}, {end})",
            )
        if rank.tp_rank == 0:
            if start < expected:
                text = f"holds layers [{start}, {end}), and those before already hold those up to"
                raise _layers_missing(spec, f"stage {rank.pp_rank} {text} {expected - 1}")
            if start > expected:
                text = f"are held by no stage: stage {rank.pp_rank} begins at layer {start}"
                raise _layers_missing(spec, f"layers [{expected}, {start}) {text}")
            expected = end
    if expected != spec.num_layers:
        raise _layers_missing(spec, f"its stages hold layers [0, {expected}) of {spec.num_layers}")


def _layers_missing(spec: EngineSpec, what: str) -> EngineError:
    return EngineError(f"cannot use engine {spec.key}: {what}", Code.LAYERS_MISSING)


def require_pp_aware(ranks: Iterable[tuple[int, int]], consumer: str) -> None:
    """Raise NotPPAwareError if any of `ranks`, ``(pp_rank, tp_rank)``, is beyond the first stage."""
    other = min((rank for rank in ranks if rank[0] != 0), default=None)
    if other is not None:
        raise NotPPAwareError(
            f"cannot give rank {Rank(*other)} to {consumer}: it is not PP-aware and would read stage 0 "
            "alone; set its pp_aware to true (peer.pp_aware of a node) if it can read pipeline stages, or "
            "serve the source with one stage"
        )


def set_xfer_handshake_metadata_pp_aware(
    consumer: Any, metadata: Iterable[Mapping[RankKey, Any] | None]
) -> None:
    """Merge the workers' ``{(pp_rank, tp_rank): metadata}`` and pass them to a consumer.

    A consumer is a connector, or what the daemon makes of a reader (`kvxferd.core.peers.manifest_checks`).
    None, from a worker without metadata, is skipped. A consumer that has a method of this function's
    name is PP-aware and gets the merged mapping unchanged. Another gets ``{tp_rank: metadata}`` by
    `set_xfer_handshake_metadata` if every pp_rank is 0; else NotPPAwareError, a ValueError, is raised.
    It has the consumer's `consumer_name`, or its class where there is none. Raises EngineError (rank-taken)
    where two workers report one rank.
    """
    merged: dict[RankKey, Any] = {}
    for worker in metadata:
        for rank, reported in (worker or {}).items():
            if rank in merged:
                raise EngineError(f"cannot merge metadata: two workers report {Rank(*rank)}", Code.RANK_TAKEN)
            merged[rank] = reported
    pp_aware = getattr(consumer, "set_xfer_handshake_metadata_pp_aware", None)
    if callable(pp_aware):
        pp_aware(merged)
        return
    name = getattr(consumer, "consumer_name", None)
    require_pp_aware(merged, name if isinstance(name, str) else type(consumer).__name__)
    consumer.set_xfer_handshake_metadata({tp_rank: value for (_, tp_rank), value in merged.items()})
