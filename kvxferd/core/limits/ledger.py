"""Who holds how much of each limit, so that one user cannot make all others `busy`.

The rule: the last eighth of a limit is for users who hold at most a sixteenth of it. So the only user
of a node (the normal case) gets seven eighths of everything, and a second user finds room, however much
the first one requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvxferd.config import LimitsConfig
from kvxferd.core.limits import table
from kvxferd.core.limits.table import RETRY_AFTER_S, SETTING, Limit
from kvxferd.errors import BusyError, Code, EngineError
from kvxferd.ids import GroupName
from kvxferd.layout import PackedBlocks, num_id_bytes
from kvxferd.wire.common import RankIncarnations
from kvxferd.wire.limits import MAX_REQUEST_IDS_BYTES

RESERVE_DIVISOR = 8  # one part in eight is reserved for users who hold little
SMALL_DIVISOR = 16  # a user who holds one part in sixteen or less, or a single unit, holds little
# A user's only pull may be of any size, and a rank leaves its home all the same; transfers may end together.
MAY_BE_PASSED = frozenset({"max_inflight_bytes", "open_requests", "ended_transfers"})
EXACT_S = 1e-9  # a shorter wait is the rounding of sums

# What a transfer or a pull is counted for without its ids (timers, indexes, names), and a group. Measured on
# 2026-11-22, with ids of 32 characters: a transfer of one group takes 2.1 KB, a pull with its hold 3.4 KB
# where it is counted for 4.6, a group 0.1.
ENTRY_BYTES, GROUP_BYTES = 2048, 256
# An entry of a transfer's mapping from ranks to incarnations, and a character of an incarnation at its
# widest. Of 64 ranks with names of 16 characters that is 8 KiB; transfers that name the same share it.
RANK_BYTES, CHAR_BYTES = 64, 4

Owner = int | str  # a user id, or a peer: its CURVE key, or without keys its route
Charge = tuple[Limit, Owner, int]  # what something that is kept is counted for, for whom, and with how much


class FairShare:
    """Counts how much of one limit each user holds."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.by_owner: dict[Owner, int] = {}  # a Counter's missing entries cost 1 us each

    def has_room(self, uid: Owner, amount: int = 1) -> bool:
        """Whether the user may hold `amount` more."""
        after = self.held + amount
        if after <= self.limit - self.limit // RESERVE_DIVISOR:
            return True
        return after <= self.limit and self.held_by(uid) + amount <= max(1, self.limit // SMALL_DIVISOR)

    def acquire(self, uid: Owner, amount: int = 1) -> bool:
        """Count `amount` more for the user if there is room. Return whether there was."""
        if not self.has_room(uid, amount):
            return False
        self.add(uid, amount)
        return True

    def add(self, uid: Owner, amount: int) -> None:
        """Count `amount` more for the user, whether or not there is room."""
        self.held += amount
        if held := self.by_owner.get(uid, 0) + amount:
            self.by_owner[uid] = held
        else:
            self.by_owner.pop(uid, None)

    def release(self, uid: Owner, amount: int = 1) -> None:
        """Count `amount` less for the user."""
        self.add(uid, -amount)

    def held_by(self, uid: Owner) -> int:
        """Return how much the user holds."""
        return self.by_owner.get(uid, 0)


class Share(FairShare):
    """A row of the table: charged when something is kept, given back when it ends."""

    def __init__(self, row: Limit, total: int) -> None:
        super().__init__(total)
        self._row = row

    def check(self, owner: Owner, amount: int, what: str) -> None:
        """Raise BusyError where the owner has no room for so much. `what`: "pull transfer t"."""
        if not self.has_room(owner, amount):
            raise self.refusal(owner, what)

    def refusal(self, owner: Owner, what: str) -> BusyError:
        """Return the refusal of what has no room."""
        row = self._row
        whose = "this peer" if row.is_of_peers else f"uid {owner}"
        taken = f"{self.held} of {self.limit} {row.unit}".rstrip()
        if row.total == SETTING:
            taken += f" (limits.{row.name})"
        return BusyError(
            f"cannot {what}: {taken} are taken by {row.of}, {self.held_by(owner)} of them of {whose}, and "
            f"the last eighth is for who has little; try again in {row.retry_after_s:g} s",
            row.retry_after_s,
            row.name,
        )


class Ledger:
    """The shares of one node, by limit."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._shares = {
            name: Share(row, getattr(limits, name) if row.total == SETTING else row.total)
            for name, row in table.TABLE.items()
        }

    def __getitem__(self, limit: Limit) -> Share:
        """Return the share of that limit."""
        return self._shares[limit.name]

    def check_integrity(self, charges: Iterable[Charge]) -> None:
        """Raise AssertionError where the shares are not the sums of what is kept."""
        kept: dict[str, dict[Owner, int]] = {name: {} for name in self._shares}
        for limit, owner, amount in charges:
            kept[limit.name][owner] = kept[limit.name].get(owner, 0) + amount
        for name, share in self._shares.items():
            kept_by = {owner: amount for owner, amount in kept[name].items() if amount}
            assert kept_by == share.by_owner, f"{name}: {share.by_owner} counted, {kept_by} kept"
            assert share.held <= share.limit or name in MAY_BE_PASSED, f"{name}: {share.held} are counted"


class RateLimiter:
    """A token bucket for each user. A bucket that is full again is forgotten."""

    def __init__(self, burst: int, per_s: float) -> None:
        self.burst, self.per_s = burst, per_s
        self._full_at: dict[int, float] = {}  # when each user's bucket is full again

    def acquire(self, uid: int, now: float) -> float:
        """Take a token and return 0, or return how many seconds it takes until there is one."""
        self._full_at = {user: at for user, at in self._full_at.items() if at > now}
        full_at = self._full_at.get(uid, now)
        wait_s = full_at - now - (self.burst - 1) / self.per_s
        if wait_s > EXACT_S:
            return wait_s
        self._full_at[uid] = full_at + 1 / self.per_s
        return 0.0


def check_count(
    count: int, limit: int, what: str, setting: str, retry_after_s: float = RETRY_AFTER_S
) -> None:
    """Raise BusyError if one more passes the limit. `what` goes into the message, as "register: ..."."""
    if count >= limit:
        raise BusyError(
            f"cannot {what} ({setting} = {limit}); try again in {retry_after_s:g} s",
            retry_after_s,
            setting.removeprefix("limits."),
        )


def request_bytes(blocks: Mapping[GroupName, PackedBlocks]) -> int:
    """Return the bytes that a transfer or pull with these lists is counted for while it is kept."""
    return ENTRY_BYTES + GROUP_BYTES * len(blocks) + num_id_bytes(blocks)


def check_num_ids(blocks: Mapping[GroupName, PackedBlocks], what: str) -> None:
    """Raise EngineError where a request lists more ids than a request may. `what`: "pull transfer t"."""
    if (num_bytes := num_id_bytes(blocks)) > MAX_REQUEST_IDS_BYTES:
        raise EngineError(
            f"cannot {what}: its block ids take {num_bytes} bytes, and {MAX_REQUEST_IDS_BYTES} is the limit; "
            "use larger blocks, or split the request",
            Code.BLOCKS_INVALID,
        )


def incarnation_bytes(num_ranks: int, named: RankIncarnations) -> int:
    """Return the bytes that a transfer of `num_ranks` ranks takes for its mapping of ranks to incarnations.

    A publisher may give any name to an absent rank: 4,096 names of 250 characters, others in each publish,
    were 1.4 MB a transfer.
    """
    return RANK_BYTES * num_ranks + sum(CHAR_BYTES * len(incarnation) for _, incarnation in named)
