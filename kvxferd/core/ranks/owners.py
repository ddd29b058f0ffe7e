"""Who owns each rank of an engine, and by that the engine's id: one table, which outlives the daemon.

A restart leaves every engine without ranks for a second. Without this table the first user that registers in
that second, or the first daemon that joins a rank, would own the engine: it could start another generation,
or give the engine another shape, and the ranks that come back would be refused.

A row is one rank of one generation. It is present, or absent and kept for its owner for a while. An owner is
a user of this node whose worker is the rank, or another node's daemon that has joined the rank here. The
owner of an engine id is the user of its latest row.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import SaveOwnerships
from kvxferd.core.events import SavedRank
from kvxferd.core.limits.ledger import Charge
from kvxferd.core.limits.table import OWNED_RANKS
from kvxferd.core.tables import discard
from kvxferd.ids import BootId, EngineId, EngineKey, Generation, Rank
from kvxferd.records import OwnershipSnapshot

MAX_SHOWN = 4096  # engine ids in a snapshot; they take 10 ms
# 4 MB of the longest names. An entry that is pushed out costs that engine the order of its generations alone.
MAX_ENGINES, MAX_GENERATIONS = 1024, 8

_USER, _KEY, _SECRET = "uid:", "key:", "secret:"

Place = tuple[EngineKey, Rank]


def user_owner(uid: int) -> str:
    """Return the owner of a rank whose worker is that user's and is connected to this daemon."""
    return f"{_USER}{uid}"


def daemon_owner(key: str, secret: str) -> str:
    """Return the owner of a rank that a daemon joins: the CURVE key that it proved to hold, or its secret.

    A secret crosses the network in the clear. It distinguishes two daemons that were given one rank by
    mistake. It does not stop an attacker who listens or who joins the rank first. A restart changes it. A
    route changes on reconnect, and a boot is part of every agent's name, so neither identifies a sender.
    """
    # The hash, since owners are written to disk.
    return _KEY + key if key else _SECRET + hashlib.blake2b(secret.encode(), digest_size=16).hexdigest()


def is_user(owner: str) -> bool:
    """Whether that owner is a user of this node."""
    return owner.startswith(_USER)


@dataclass(slots=True)
class OwnedRank:
    """A row of the table."""

    owner: str
    is_present: bool = True
    kept_until: float = 0.0  # where it is absent
    last_request: tuple[BootId, int] | None = None  # by which its daemon left it; None: it did not


@dataclass(frozen=True, slots=True)
class Disownable:
    """What an operator can take from an engine id."""

    uid: int | None  # its owner while none of its ranks is here
    num_ranks: int  # kept for a daemon, or a worker, that is not here

    def __bool__(self) -> bool:
        return self.uid is not None or self.num_ranks > 0


class Owners:
    """The owners of ranks by engine, generation and rank. The shell keeps `saved_ranks()` on disk."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._rows: dict[EngineId, dict[Place, OwnedRank]] = {}
        self._absent: dict[str, dict[Place, None]] = {}  # by account, the oldest first
        self._share = context.ledger[OWNED_RANKS]  # by account
        self._generations: OrderedDict[EngineId, list[Generation]] = OrderedDict()  # as they were met

    def find(self, key: EngineKey, rank: Rank) -> OwnedRank | None:
        """Return the rank's row; None: nobody owns it."""
        return self._rows.get(key.engine_id, {}).get((key, rank))

    def find_absent(self, key: EngineKey, rank: Rank) -> OwnedRank | None:
        """Return the rank's row if it is kept for an owner that is not here, else None."""
        row = self.find(key, rank)
        return row if row is not None and not row.is_present else None

    def left_s(self, row: OwnedRank) -> float:
        """Return for how long an absent rank is still kept."""
        return max(0.0, row.kept_until - self._context.now)

    def user_of(self, engine_id: EngineId) -> int | None:
        """Return the user who owns the engine id; None: no user of this node does."""
        rows = reversed(self._rows.get(engine_id, {}).values())
        owner = next((row.owner for row in rows if is_user(row.owner)), None)
        return int(owner.removeprefix(_USER)) if owner is not None else None

    def num_absent(self, engine_id: EngineId) -> int:
        """Return how many ranks of the engine are kept for owners that are not here."""
        return sum(1 for _ in self._absent_rows(engine_id))

    def awaits_daemon(self, engine_id: EngineId, excluding: str = "") -> bool:
        """Whether a rank of any generation is kept for an absent daemon other than `excluding`."""
        return any(
            not is_user(row.owner) and row.owner != excluding for _, row in self._absent_rows(engine_id)
        )

    def awaits_worker(self, key: EngineKey) -> bool:
        """Whether a worker of this node may be back: of that generation, or gone for a short time."""
        settings = self._context.settings
        late = self._context.now + settings.worker.ownership_s - settings.member_silent_after_s
        return any(
            is_user(row.owner) and (of == key or row.kept_until > late)
            for of, row in self._absent_rows(key.engine_id)
        )

    def _absent_rows(self, engine_id: EngineId) -> Iterator[tuple[EngineKey, OwnedRank]]:
        rows = self._rows.get(engine_id, {})
        return ((key, row) for (key, _), row in rows.items() if not row.is_present)

    def snapshot(self) -> tuple[OwnershipSnapshot, ...]:
        """Return at most `MAX_SHOWN` engine ids that have a user or absent ranks, those with users first."""
        shown = (e for e in self._rows if self.user_of(e) is not None or self.num_absent(e))
        return tuple(
            self._snapshot_of(e) for e in sorted(shown, key=lambda e: self.user_of(e) is None)[:MAX_SHOWN]
        )

    def _snapshot_of(self, engine_id: EngineId) -> OwnershipSnapshot:
        users = [row for row in self._rows[engine_id].values() if is_user(row.owner)]
        is_absent = bool(users) and not any(row.is_present for row in users)
        kept_until = max((row.kept_until for row in users), default=0.0)
        return OwnershipSnapshot(
            engine_id=engine_id,
            uid=self.user_of(engine_id),
            expires_in_s=round(kept_until - self._context.now, 3) if is_absent else None,
            num_kept_ranks=self.num_absent(engine_id),
        )

    # --- a daemon's restart

    def saved_ranks(self) -> tuple[SavedRank, ...]:
        """Return what the next daemon needs: every row but those of daemons that have left."""
        return tuple(
            (key.engine_id, key.generation, rank.pp_rank, rank.tp_rank, row.owner)
            for rows in self._rows.values()
            for (key, rank), row in rows.items()
            if row.last_request is None
        )

    def restore(self, listed: Iterable[SavedRank]) -> None:
        """Load what an earlier daemon saved, as if all ranks had gone now."""
        for engine_id, generation, pp_rank, tp_rank, owner in listed:
            key, rank = EngineKey(engine_id, generation), Rank(pp_rank, tp_rank)
            self.add_generation(key)
            if self.find(key, rank) is None and (row := self._add(key, rank, owner)) is not None:
                self._keep(key, rank, row)

    # --- ranks come and go

    def set_present(self, key: EngineKey, rank: Rank, owner: str) -> None:
        """Give a rank that is here to its owner."""
        row = self.find(key, rank)
        if row is not None and row.owner == owner:
            self._end_absence(key, rank, row)
            return
        self.forget(key, rank)
        if self._add(key, rank, owner) is not None:
            self._context.emit(SaveOwnerships())

    def rank_gone(self, key: EngineKey, rank: Rank) -> None:
        """Keep a rank for its owner that is not here any more."""
        row = self.find(key, rank)
        if row is not None and row.is_present:
            self._keep(key, rank, row)

    def rank_left(self, key: EngineKey, rank: Rank, owner: str, request: tuple[BootId, int]) -> None:
        """Keep a rank that its daemon has left by that request: maybe its mover is only replaced.

        A repeated request does not keep it for longer. Does nothing where another owns the rank.
        """
        row = self.find(key, rank)
        if row is None or row.owner != owner:
            return
        former, row.last_request = row.last_request, request
        if former is None:
            self._keep(key, rank, row)
            self._context.emit(SaveOwnerships())
        elif former[0] == request[0]:
            row.last_request = max(former, request)

    def forget(self, key: EngineKey, rank: Rank) -> None:
        """Remove the rank's row."""
        row = self.find(key, rank)
        if row is None:
            return
        self._end_absence(key, rank, row)
        rows = self._rows[key.engine_id]
        del rows[key, rank]
        if not rows:
            del self._rows[key.engine_id]
        self._share.release(_account(row.owner))
        self._context.emit(SaveOwnerships())

    def forget_absent(self, engine_id: EngineId, excluding: EngineKey | None = None) -> None:
        """Forget the engine's absent ranks, except those of generation `excluding`."""
        rows = self._rows.get(engine_id, {})
        for key, rank in [(k, r) for (k, r), row in rows.items() if not row.is_present and k != excluding]:
            self.forget(key, rank)

    def _add(self, key: EngineKey, rank: Rank, owner: str) -> OwnedRank | None:
        """Add a row. At a limit its owner's oldest absent one makes room; None: there is none."""
        account = _account(owner)
        if not self._share.has_room(account):
            oldest = next(iter(self._absent.get(account, ())), None)
            if oldest is None:
                return None
            self.forget(*oldest)
        row = self._rows.setdefault(key.engine_id, {})[key, rank] = OwnedRank(owner)
        self._share.add(account, 1)
        return row

    def charges(self) -> Iterator[Charge]:
        """Yield what the rows are counted for."""
        for rows in self._rows.values():
            for row in rows.values():
                yield OWNED_RANKS, _account(row.owner), 1

    def _keep(self, key: EngineKey, rank: Rank, row: OwnedRank) -> None:
        """Keep an absent row for `ownership_s`, and for a shorter time where its daemon may be another next.

        A member's daemon that has left a rank may have lost it to another node. One that restarts has another
        secret, and only silence shows that the former one is gone.
        """
        settings = self._context.settings
        is_short = row.last_request is not None or row.owner.startswith(_SECRET)
        keep_s = settings.member_silent_after_s if is_short else settings.worker.ownership_s
        row.is_present, row.kept_until = False, self._context.now + keep_s
        self._absent.setdefault(_account(row.owner), {})[key, rank] = None
        self._context.after(("owner", key, rank), keep_s, lambda: self.forget(key, rank))

    def _end_absence(self, key: EngineKey, rank: Rank, row: OwnedRank) -> None:
        if row.is_present:
            return
        discard(self._absent, _account(row.owner), (key, rank))
        self._context.timers.cancel(("owner", key, rank))
        if row.last_request is not None:
            self._context.emit(SaveOwnerships())
        row.is_present, row.last_request = True, None

    # --- generations

    def add_generation(self, key: EngineKey) -> None:
        """Add a generation as the engine's newest, if it is new.

        A rank connects again after a restart of the daemon, and a generation that has been replaced is still
        running then for a moment. By the order of arrival alone it would replace the one that replaced it.
        """
        met = self._generations.setdefault(key.engine_id, [])
        self._generations.move_to_end(key.engine_id)
        if key.generation not in met:
            met.append(key.generation)
            del met[:-MAX_GENERATIONS]
        if len(self._generations) > MAX_ENGINES:
            self._generations.popitem(last=False)

    def position_of(self, key: EngineKey) -> int:
        """Return where a generation stands in the order in which its engine's were met; -1: it is unknown."""
        met = self._generations.get(key.engine_id, [])
        return met.index(key.generation) if key.generation in met else -1


def _account(owner: str) -> str:
    """Return what an owner's rows count for: all secrets are one, since a daemon can name any number."""
    return _SECRET if owner.startswith(_SECRET) else owner
