"""What ranks report of transfers before their publish: a rank may have written its bytes first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvxferd.core.context import NodeContext
from kvxferd.core.limits.ledger import Charge, Owner
from kvxferd.core.limits.table import EARLY_READY
from kvxferd.core.ranks.registry import Registry
from kvxferd.core.source.transfer_table import ALL_TOKENS, TransferKey
from kvxferd.ids import BootId, EngineKey, Incarnation, Rank, TransferId
from kvxferd.wire.peer import RankReady
from kvxferd.wire.worker import Ready


class Report(NamedTuple):
    """How far a rank has written a transfer, and in which mapping of its memory."""

    incarnation: Incarnation
    num_tokens: int  # counted from the first
    request: tuple[BootId, int] | None = None  # of the rank's daemon, if that is another: it repeats this


@dataclass(slots=True)
class _Announced:
    owner: Owner
    reports: dict[Rank, Report] = field(default_factory=dict)
    late: set[tuple[BootId, int]] = field(default_factory=set)  # requests whose reports count no more

    def end_report(self, rank: Rank) -> None:
        if (request := self.reports.pop(rank).request) is not None:
            self.late.add(request)


def report_of(message: Ready | RankReady, request: tuple[BootId, int] | None = None) -> Report:
    """Return what a message reports; `request`: as in `Report`."""
    num_tokens = ALL_TOKENS if message.ready_tokens < 0 else message.ready_tokens
    return Report(message.incarnation, num_tokens, request)


class Announcements:
    """Keeps each report for `lease_s`, and then its request for as long as that may be repeated.

    A repeated one would count for the next transfer of an id that was never published: it has no tombstone.
    """

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._share = context.ledger[EARLY_READY]
        self._by_engine: dict[EngineKey, dict[TransferId, _Announced]] = {}

    def __iter__(self) -> Iterator[TransferKey]:
        """Iterate over the transfers of which something is kept."""
        for engine, announced in self._by_engine.items():
            yield from ((engine, transfer_id) for transfer_id in announced)

    def __contains__(self, key: TransferKey) -> bool:
        return self._find(key) is not None

    def is_late(self, key: TransferKey, report: Report) -> bool:
        """Whether the report was here before, and counts no more."""
        one = None if report.request is None else self._find(key)
        return one is not None and report.request in one.late

    def add(self, key: TransferKey, rank: Rank, report: Report, owner: Owner) -> bool:
        """Keep a report; False where there is no room: an engine may report and never publish."""
        engine, one = key[0], self._find(key)
        if one is None:
            limit = self._context.settings.limits.max_transfers_per_engine
            if len(self._by_engine.get(engine, ())) >= limit or not self._share.acquire(owner):
                return False
            one = self._by_engine.setdefault(engine, {})[key[1]] = _Announced(owner)
        known = one.reports.get(rank)
        if known is None or known.num_tokens < report.num_tokens:  # of the same mapping: `rank_changed`
            if known is not None:
                one.end_report(rank)
            one.reports[rank] = report
            lease_s = self._context.settings.transfer.lease_s
            self._context.after(("announced", key), lease_s, lambda: self._expire(key))
        elif report.request not in (None, known.request):
            one.late.add(report.request)
        return True

    def take(self, key: TransferKey) -> Mapping[Rank, Report]:
        """Return the reports of the transfer, which count here no more."""
        one = self._find(key)
        if one is None:
            return {}
        reports, one.reports = one.reports, {}
        if one.late:
            repeated_s = 2 * self._context.settings.acknowledge_for_s
            self._context.after(("announced", key), repeated_s, lambda: self._forget(key))
        else:
            self._forget(key)
        return reports

    def rank_changed(self, engine: EngineKey, rank: Rank, present: Incarnation) -> None:
        """Drop the rank's reports, except those of its present mapping: the bytes are gone."""
        for one in self._by_engine.get(engine, {}).values():
            if rank in one.reports and one.reports[rank].incarnation != present:
                one.end_report(rank)

    def _find(self, key: TransferKey) -> _Announced | None:
        return self._by_engine.get(key[0], {}).get(key[1])

    def _expire(self, key: TransferKey) -> None:
        one = self._by_engine[key[0]][key[1]]
        for rank in list(one.reports):
            one.end_report(rank)
        self.take(key)

    def _forget(self, key: TransferKey) -> None:
        engine, transfer_id = key
        self._share.release(self._by_engine[engine].pop(transfer_id).owner)
        if not self._by_engine[engine]:
            del self._by_engine[engine]
        self._context.timers.cancel(("announced", key))

    def charges(self) -> Iterator[Charge]:
        """Yield what the announced transfers are counted for."""
        for announced in self._by_engine.values():
            yield from ((EARLY_READY, one.owner, 1) for one in announced.values())

    def check_integrity(self, registry: Registry) -> None:
        """Raise AssertionError where a report is kept of memory that is gone."""
        for key, announced in self._by_engine.items():
            records = engine.ranks if (engine := registry.get(key)) is not None else {}
            for transfer_id, one in announced.items():
                for rank in one.reports.keys() & records.keys():
                    named = one.reports[rank].incarnation
                    assert named == records[rank].incarnation, (
                        f"{transfer_id} of {key}: rank {rank} was ready in another mapping"
                    )
