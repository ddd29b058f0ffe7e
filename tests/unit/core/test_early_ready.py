"""What is ready before its publish is counted by engine."""

from __future__ import annotations

from kvxferd.core.transfer_table import EarlyReady, TransferTable
from kvxferd.ids import EngineId, EngineKey, Generation, Incarnation, Rank, TransferId

RANK, MAPPING = Rank(0, 0), Incarnation("first")


class Seen(dict):  # type: ignore[type-arg]
    """Counts how often all of it is gone through."""

    num_walks = 0

    def __iter__(self):  # type: ignore[no-untyped-def]
        Seen.num_walks += 1
        return super().__iter__()

    def items(self):  # type: ignore[no-untyped-def]
        Seen.num_walks += 1
        return super().items()


def test_room_and_sleep_look_at_the_engines_own() -> None:
    transfers = TransferTable()
    transfers.early_ready = Seen()
    one, other = (EngineKey(EngineId(name), Generation("g")) for name in ("one", "other"))
    for number in range(10):
        transfers.add_early_ready((other, TransferId(f"t{number}")), RANK, EarlyReady(MAPPING))
    assert transfers.has_room_for_ready(one, 5)
    assert not transfers.has_room_for_ready(other, 10)
    transfers.end_early_ready(one, RANK)
    assert Seen.num_walks == 0
    transfers.end_early_ready(other, RANK)
    for number in range(10):
        transfers.forget_early_ready((other, TransferId(f"t{number}")))
    assert transfers.has_room_for_ready(other, 1)
    assert not transfers._early_by_engine
