"""Who holds how much of each limit of the table."""

from __future__ import annotations

from collections.abc import Iterable

from kvxferd.config import LimitsConfig
from kvxferd.core.limits import table
from kvxferd.core.limits.fair_share import FairShare, Owner
from kvxferd.core.limits.table import RETRY_AFTER_S, SETTING, Limit
from kvxferd.errors import BusyError

Charge = tuple[Limit, Owner, int]  # what something that is kept is counted for, for whom, and with how much


class Share(FairShare):
    """One limit: charged when something is kept, given back when it ends."""

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
