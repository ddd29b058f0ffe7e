"""What the daemon remembers of pulls stays within its bounds, however many engines there are."""

from __future__ import annotations

import msgspec
import numpy as np

from kvxferd.core.snapshot import ServedRecord
from kvxferd.errors import Code
from kvxferd.ids import Endpoint, EngineId, TransferId
from kvxferd.telemetry.bounded_series import MAX_SERIES, MAX_WAITING, EngineAndPeerCollector
from kvxferd.telemetry.history import MAX_BYTES, MAX_KEPT, MAX_RECORDS, History
from kvxferd.telemetry.notable_records import MAX_EXPIRED, MAX_FAILED, MAX_SLOWEST_A_MINUTE, NUM_MINUTES
from kvxferd.telemetry.samples import MAX_KEYS, Gauges, Samples
from tests.support.node_samples import pull_record

NUM_ENGINES = 10_000


def array_bytes(of: object) -> int:
    return sum(value.nbytes for value in vars(of).values() if isinstance(value, np.ndarray))


def test_ten_thousand_engines_and_peers_take_no_more_than_the_bounds() -> None:
    number = 0
    history, samples = History(), Samples()
    series = EngineAndPeerCollector(by_engine=True, by_peer=True, clock=lambda: float(number))
    samples.start(0.0)
    tables = (samples._pairs, samples._peers)
    arrays = [array_bytes(one) for one in (samples, *tables)]
    for number in range(NUM_ENGINES):
        now = number / 100
        has_failed = number % 3 == 0
        record = msgspec.structs.replace(
            pull_record(),
            transfer_id=TransferId(f"request-{number}"),
            source=EngineId(f"{number:0>256}"),
            peer=Endpoint(f"tcp://10.1.{number >> 8}.{number & 255}:1"),
            ended_at=now,
            outcome="failed" if has_failed else "delivered",
            code=Code.TRANSPORT if has_failed else None,
            message="x" * 2_000 if has_failed else "",
            bytes=4 << 20,
        )
        history.add(record)
        samples.add(record)
        series.record_pull(record)
        series.record_served(ServedRecord(source=record.source, sink=record.sink, peer=record.peer, bytes=1))
        if number % 100 == 0:
            samples.finish_second(now, now, Gauges())
    assert len(history._entries) <= MAX_RECORDS
    assert len(history._kept) <= MAX_KEPT
    assert history._num_bytes + history._num_kept_bytes <= MAX_BYTES * 5 // 4
    assert len(list(history.notable)) <= MAX_FAILED + MAX_EXPIRED + NUM_MINUTES * MAX_SLOWEST_A_MINUTE
    for table in tables:
        assert len(table._rows) <= MAX_KEYS
        assert len(table._pending) <= MAX_KEYS + 1
        assert len(table._last_failures) <= MAX_KEYS + 1
    assert [array_bytes(one) for one in (samples, *tables)] == arrays
    assert len(samples._failures) <= len(Code)
    for rows in (series._pairs, series._peers):
        assert rows is not None
        assert len(rows.rows) <= MAX_SERIES + 1
        assert len(rows._waiting) <= MAX_WAITING
