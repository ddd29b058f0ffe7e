"""The owner of an engine id while none of its ranks is here: its last user, for some minutes.

A daemon's restart leaves every engine without ranks for a second. Without this record the first user that
registers in that second gets the id, and the engine that comes back is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import SaveOwnerships
from kvxferd.core.events import SavedRank
from kvxferd.core.ranks.rank_holders import RankHolders
from kvxferd.ids import EngineId
from kvxferd.records import OwnershipSnapshot

# A user has at most 64 ranks at a time (limits.max_ranks), one engine each at most. 256 are those and
# three starts of each under new names within the minutes for which an id is kept.
MAX_PER_USER = 256
# 16 users at their limit. With ids of 256 characters this is 1.2 MB of file and 3 MB of memory.
MAX_OWNERSHIPS = 4096


@dataclass(slots=True)
class _Ownership:
    uid: int
    present: bool  # a rank of the engine is here
    expires_at: float = 0.0  # once no rank is here


@dataclass(frozen=True, slots=True)
class Disownable:
    """What an operator can take from an engine id."""

    uid: int | None  # its owner while none of its ranks is here
    num_ranks: int  # kept for a daemon, or a worker, that is not here

    def __bool__(self) -> bool:
        return self.uid is not None or self.num_ranks > 0


class Ownerships:
    """Engine ids and their users. The shell keeps `saved_state()` on disk."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._entries: dict[EngineId, _Ownership] = {}  # in the order of their last ready rank
        self.rank_holders = RankHolders(context)

    def uid_of(self, engine_id: EngineId) -> int | None:
        """Return the user who owns the id; None: no user does."""
        kept = self._entries.get(engine_id)
        return kept.uid if kept is not None else None

    def saved_state(self) -> tuple[tuple[tuple[EngineId, int], ...], tuple[SavedRank, ...]]:
        """Return what the next daemon needs: the users of ids, and the holders of ranks."""
        return self.saved_users(), self.rank_holders.saved_ranks()

    def saved_users(self) -> tuple[tuple[EngineId, int], ...]:
        """Return every id with its user, in the order in which `restore` takes them."""
        return tuple((engine_id, kept.uid) for engine_id, kept in self._entries.items())

    def snapshot(self) -> tuple[OwnershipSnapshot, ...]:
        """Return at most `MAX_OWNERSHIPS` of them, those of local users first. 4,096 take 10 ms."""
        ids = itertools.chain(
            self._entries, (e for e in self.rank_holders.absent_engines() if e not in self._entries)
        )
        return tuple(map(self._snapshot_of, itertools.islice(ids, MAX_OWNERSHIPS)))

    def _snapshot_of(self, engine_id: EngineId) -> OwnershipSnapshot:
        kept = self._entries.get(engine_id)
        is_absent = kept is not None and not kept.present
        return OwnershipSnapshot(
            engine_id=engine_id,
            uid=kept.uid if kept is not None else None,
            expires_in_s=round(kept.expires_at - self._context.now, 3) if kept and is_absent else None,
            num_kept_ranks=self.rank_holders.num_absent(engine_id),
        )

    def restore(self, listed: Iterable[tuple[EngineId, int]]) -> None:
        """Load what an earlier daemon saved. Each id is kept as if its last rank had left now."""
        for engine_id, uid in listed:
            if self._make_room(uid):
                self._entries[engine_id] = _Ownership(uid, present=False)
                self._expire_later(engine_id)

    def rank_ready(self, engine_id: EngineId, uid: int) -> None:
        """Give the id to the user of a rank that is readable now."""
        known = self._entries.pop(engine_id, None)
        self._context.timers.cancel(_timer_name(engine_id))
        if known is None and not self._make_room(uid):
            return  # the engine has the id while a rank is here, and no longer
        self._entries[engine_id] = _Ownership(uid, present=True)
        if known is None or known.uid != uid:
            self._context.emit(SaveOwnerships())

    def last_rank_left(self, engine_id: EngineId) -> None:
        """Keep the id for `ownership_s`: no rank of the engine is here any more."""
        if kept := self._entries.get(engine_id):
            kept.present = False
            self._expire_later(engine_id)

    def forget(self, engine_id: EngineId) -> None:
        """Remove the id's owner."""
        self._context.timers.cancel(_timer_name(engine_id))
        if self._entries.pop(engine_id, None) is not None:
            self._context.emit(SaveOwnerships())

    def _expire_later(self, engine_id: EngineId) -> None:
        after_s = self._context.settings.ownership_s
        self._entries[engine_id].expires_at = self._context.now + after_s
        self._context.after(_timer_name(engine_id), after_s, lambda: self.forget(engine_id))

    def _make_room(self, uid: int) -> bool:
        """At the user's limit, drop its oldest id. Return False at the node's limit: none is dropped."""
        own = [engine_id for engine_id, kept in self._entries.items() if kept.uid == uid]
        if len(own) >= MAX_PER_USER:
            absent = (engine_id for engine_id in own if not self._entries[engine_id].present)
            self.forget(next(absent, own[0]))
        return len(self._entries) < MAX_OWNERSHIPS


def _timer_name(engine_id: EngineId) -> tuple[str, EngineId]:
    return ("ownership", engine_id)
