"""The holder of each rank of an engine, kept while the rank is absent for a short time.

A restart of the home leaves every engine without ranks for a second. Without this record the first peer
that joins a rank in that second owns it, and can give the engine another shape or start another generation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import SaveOwnerships
from kvxferd.core.events import SavedRank
from kvxferd.core.ranks.generation_order import GenerationOrder
from kvxferd.core.ranks.identity import SECRET_HOLDER
from kvxferd.core.tables import decrease
from kvxferd.ids import EngineId, EngineKey, Rank

# A home has 4,096 ranks of other nodes, 2,048 of one peer, and 128 of its own (`limits.max_ranks`). Twice the
# first leaves room for the ranks that left in the last minutes. An entry takes 0.5 KB: 4 MB. A user may
# register four ranks a second: one that does nothing else loses its own oldest entries, and no other user's.
MAX_HELD_RANKS, MAX_HELD_RANKS_PER_PEER, MAX_HELD_RANKS_PER_USER = 8192, 2048, 512

_USER = "uid:"


def holder_of_user(uid: int) -> str:
    """Return the holder of a rank whose worker is that user's and is connected to this daemon."""
    return f"{_USER}{uid}"


def is_local_user(holder: str) -> bool:
    """Whether that holder is a user of this node."""
    return holder.startswith(_USER)


@dataclass(slots=True)
class _HeldRank:
    holder: str
    is_present: bool
    has_left: bool = False  # by its own request; False: it was present when an earlier daemon ended
    expires_at: float = 0.0  # where it is not present


class RankHolders:
    """Holders of ranks by engine, generation and rank. The shell keeps `saved_ranks()` on disk."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._held: dict[EngineId, dict[tuple[EngineKey, Rank], _HeldRank]] = {}
        self._num = 0
        self._num_by_holder: Counter[str] = Counter()
        # The absent ones: of each engine id by holder, and of each holder the oldest first.
        self._num_absent_by_engine: dict[EngineId, Counter[str]] = {}
        self._absent_by_holder: dict[str, dict[tuple[EngineKey, Rank], None]] = {}
        self._local_left_at: dict[EngineId, float] = {}  # when the last rank of this node left
        self.generations = GenerationOrder()

    def __len__(self) -> int:
        return self._num

    def holder_of(self, key: EngineKey, rank: Rank) -> str | None:
        """Return the rank's holder, present or not; None: it has none."""
        held = self._get(key, rank)
        return held.holder if held is not None else None

    def absent_holder(self, key: EngineKey, rank: Rank) -> str | None:
        """Return the rank's holder if it is absent, else None."""
        held = self._get(key, rank)
        return held.holder if held is not None and not held.is_present else None

    def remaining_s(self, key: EngineKey, rank: Rank) -> float:
        """Return for how long an absent holder keeps the rank."""
        held = self._get(key, rank)
        return max(0.0, held.expires_at - self._context.now) if held is not None else 0.0

    def has_absent_members(self, engine_id: EngineId, excluding: str = "") -> bool:
        """Whether a rank of any generation is kept for an absent daemon other than `excluding`."""
        absent = self._num_absent_by_engine.get(engine_id, ())
        return any(not is_local_user(holder) and holder != excluding for holder in absent)

    def local_left_recently(self, engine_id: EngineId) -> bool:
        """Whether a worker of this node that was a rank of the engine left a short time ago."""
        left_at = self._local_left_at.get(engine_id)
        return (
            left_at is not None and self._context.now < left_at + self._context.settings.member_silent_after_s
        )

    def has_absent_local(self, key: EngineKey) -> bool:
        """Whether a rank of that generation is kept for a worker of this node that is not here."""
        if key.engine_id not in self._local_left_at:
            return False
        return any(
            of == key and is_local_user(held.holder) and not held.is_present
            for (of, _), held in self._held[key.engine_id].items()
        )

    def saved_ranks(self) -> tuple[SavedRank, ...]:
        """Return what the next daemon needs: holders that are present, or were when this daemon started."""
        return tuple(
            (key.engine_id, key.generation, rank.pp_rank, rank.tp_rank, held.holder)
            for kept in self._held.values()
            for (key, rank), held in kept.items()
            if not held.has_left
        )

    def restore(self, listed: Iterable[SavedRank]) -> None:
        """Load what an earlier daemon saved, as if all ranks had left now.

        Secrets are kept for a shorter time: a member's daemon that restarts too has another secret, and only
        silence shows that the former one is gone.
        """
        settings = self._context.settings
        for engine_id, generation, pp_rank, tp_rank, holder in listed:
            key, rank = EngineKey(engine_id, generation), Rank(pp_rank, tp_rank)
            self.generations.add(key)
            if self._get(key, rank) is None and self._make_room(holder):
                is_secret = holder.startswith(SECRET_HOLDER)
                self._add(key, rank, _HeldRank(holder, is_present=True))
                self._set_absent(
                    key, rank, settings.member_silent_after_s if is_secret else settings.ownership_s
                )

    def set_holder(self, key: EngineKey, rank: Rank, holder: str) -> None:
        """Record the holder of a rank that is present."""
        known = self._get(key, rank)
        if known is not None and known.holder == holder:
            self._set_present(key, rank, known)
            return
        self._remove(key, rank)
        if holder and self._make_room(holder):
            self._add(key, rank, _HeldRank(holder, is_present=True))
            self._context.emit(SaveOwnerships())

    def rank_left(self, key: EngineKey, rank: Rank) -> None:
        """Mark the rank absent. With a key it is kept for its holder: maybe its mover is only replaced.

        With a secret nothing is kept: a member's daemon that restarts has another one.
        """
        held, settings = self._get(key, rank), self._context.settings
        if held is None:
            return
        if held.holder.startswith(SECRET_HOLDER):
            self.forget(key, rank)
        elif is_local_user(held.holder):
            # No other node has it in this generation: it is kept as long as its user owns the engine id.
            self._set_absent(key, rank, settings.ownership_s)
        elif not held.has_left:
            held.has_left = True
            self._set_absent(key, rank, settings.member_silent_after_s)
            self._context.emit(SaveOwnerships())

    def forget(self, key: EngineKey, rank: Rank) -> None:
        """Remove the rank's holder."""
        if self._remove(key, rank):
            self._context.emit(SaveOwnerships())

    def forget_absent(self, engine_id: EngineId, excluding: EngineKey | None = None) -> int:
        """Forget the engine's absent holders, except in generation `excluding`. Return how many ranks."""
        kept = self._held.get(engine_id, {})
        absent = [place for place, held in kept.items() if not held.is_present and place[0] != excluding]
        for place in absent:
            self.forget(*place)
        return len(absent)

    def num_absent(self, engine_id: EngineId) -> int:
        """Return how many ranks of the engine have an absent holder."""
        absent = self._num_absent_by_engine.get(engine_id)
        return absent.total() if absent is not None else 0

    def absent_engines(self) -> Iterable[EngineId]:
        """Return the engines of which a rank has an absent holder."""
        return self._num_absent_by_engine

    # --- the tables

    def _get(self, key: EngineKey, rank: Rank) -> _HeldRank | None:
        kept = self._held.get(key.engine_id)
        return kept.get((key, rank)) if kept is not None else None

    def _add(self, key: EngineKey, rank: Rank, held: _HeldRank) -> None:
        self._held.setdefault(key.engine_id, {})[key, rank] = held
        self._num += 1
        self._num_by_holder[held.holder] += 1

    def _remove(self, key: EngineKey, rank: Rank) -> bool:
        held = self._get(key, rank)
        if held is None:
            return False
        self._set_present(key, rank, held)  # takes it out of the tables of absent ones
        kept = self._held[key.engine_id]
        del kept[key, rank]
        if not kept:
            del self._held[key.engine_id]
        self._num -= 1
        decrease(self._num_by_holder, held.holder)
        return True

    def _set_absent(self, key: EngineKey, rank: Rank, keep_s: float) -> None:
        held = self._held[key.engine_id][key, rank]
        if held.is_present:
            held.is_present = False
            self._num_absent_by_engine.setdefault(key.engine_id, Counter())[held.holder] += 1
            self._absent_by_holder.setdefault(held.holder, {})[key, rank] = None
        if is_local_user(held.holder):
            self._local_left_at[key.engine_id] = self._context.now
        held.expires_at = self._context.now + keep_s
        self._context.after(("rank-holder", key, rank), keep_s, lambda: self.forget(key, rank))

    def _set_present(self, key: EngineKey, rank: Rank, held: _HeldRank) -> None:
        if held.has_left:
            self._context.emit(SaveOwnerships())
        if not held.is_present:
            counts, places = self._num_absent_by_engine[key.engine_id], self._absent_by_holder[held.holder]
            decrease(counts, held.holder)
            if not counts:
                del self._num_absent_by_engine[key.engine_id]
            if not any(is_local_user(holder) for holder in counts):
                self._local_left_at.pop(key.engine_id, None)
            del places[key, rank]
            if not places:
                del self._absent_by_holder[held.holder]
            self._context.timers.cancel(("rank-holder", key, rank))
        held.is_present, held.has_left = True, False

    def _make_room(self, holder: str) -> bool:
        """At a holder's limit, drop its oldest absent entry. Return False if there is still no room."""
        limit = MAX_HELD_RANKS_PER_USER if is_local_user(holder) else MAX_HELD_RANKS_PER_PEER
        if self._num_by_holder[holder] >= limit:
            oldest = next(iter(self._absent_by_holder.get(holder, ())), None)
            if oldest is None:
                return False
            self.forget(*oldest)
        return len(self) < MAX_HELD_RANKS
