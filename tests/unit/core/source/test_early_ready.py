"""What is ready before its publish is counted by engine."""

from __future__ import annotations

from kvxferd.config import LimitsConfig
from kvxferd.core.limits.ledger import Ledger
from kvxferd.core.source.transfer_table import EarlyReady, Transfer, TransferTable
from kvxferd.ids import EngineId, EngineKey, Generation, Incarnation, Rank, SessionId, TransferId
from kvxferd.wire.worker import Ready
from tests.support.simulation import World

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
    transfers = TransferTable(Ledger(LimitsConfig()))
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


def test_what_a_rank_said_early_goes_with_its_process() -> None:
    world = World()
    worker = world.engine(world.host("p"), "prefill")[0]
    worker.say(Ready(transfer_id=TransferId("t1"), incarnation=Incarnation(worker.incarnation)))
    table = worker.host.node.published.table
    assert any(table.early_ready.values())
    worker.close()
    successor = world.connect(worker.host)
    successor.spec, successor.layout, successor.memory = worker.spec, worker.layout, worker.memory
    world.register_again(successor, "second")
    assert not any(table.early_ready.values())


def test_a_publish_takes_no_early_ready_of_other_memory_than_its_own() -> None:
    transfers = TransferTable(Ledger(LimitsConfig()))
    engine, transfer_id = EngineKey(EngineId("one"), Generation("g")), TransferId("t1")
    transfers.add_early_ready((engine, transfer_id), RANK, EarlyReady(Incarnation("another")))
    transfer = Transfer(
        engine=engine,
        transfer_id=transfer_id,
        nonce="",
        session=SessionId(1),
        uid=0,
        fence_slot=0,
        fence_word=b"",
        blocks={},
        num_tokens=1,
        num_readers=1,
        published_at=0.0,
        lease_expires_at=30.0,
        ready=set(),
        incarnations={RANK: MAPPING},
    )
    transfers.add(transfer)
    assert transfer.ready == set()
    assert transfer.set_ready(RANK, MAPPING)
    assert transfer.ready == {RANK}
