"""An engine's spec: the fields that each of its ranks declares."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from kvxferd.ids import Endpoint, EngineId, EngineKey, Generation, Rank


class EngineSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """What one rank declares of its engine and of its own position in it.

    All fields but `pp_rank` and `tp_rank` must be equal on every rank of one generation.
    """

    engine_id: EngineId
    generation: Generation  # chosen by the engine's first rank, new at each start
    num_layers: int  # of the whole model; the stages together hold [0, num_layers)
    pp_size: int = 1
    tp_size: int = 1  # attention tensor parallelism; a data-parallel replica is an engine of its own
    pp_rank: int = 0
    tp_rank: int = 0
    num_kv_heads: int = 0  # of the whole model; 0 where there are none (MLA, pure state)
    fingerprint: str = ""  # model, revision, dtype, scales: equal fingerprints mean equal bytes
    home: Endpoint = Endpoint("")  # the daemon that aggregates the engine; "" is the local one
    pp_aware: bool = True  # False: the engine refuses any peer with pp_rank != 0
    publish_implies_ready: bool = False  # True: it publishes only after all its ranks have finished writing

    if TYPE_CHECKING:  # an engine's own ids are plain texts

        def __init__(
            self,
            engine_id: str,
            generation: str,
            num_layers: int,
            pp_size: int = 1,
            tp_size: int = 1,
            pp_rank: int = 0,
            tp_rank: int = 0,
            num_kv_heads: int = 0,
            fingerprint: str = "",
            home: str = "",
            pp_aware: bool = True,
            publish_implies_ready: bool = False,
        ) -> None: ...

    @property
    def key(self) -> EngineKey:
        """Return the engine's id and generation."""
        return EngineKey(self.engine_id, self.generation)

    @property
    def rank(self) -> Rank:
        """Return this rank as `(pp_rank, tp_rank)`."""
        return Rank(self.pp_rank, self.tp_rank)

    def ranks(self) -> list[Rank]:
        """Return every rank of the engine, stage by stage."""
        return list(_all_ranks(self.pp_size, self.tp_size))


@lru_cache(maxsize=64)
def _all_ranks(pp_size: int, tp_size: int) -> tuple[Rank, ...]:
    return tuple(Rank(pp, tp) for pp in range(pp_size) for tp in range(tp_size))
