"""First pulls that waited for a handshake or a connection."""

from __future__ import annotations

import msgspec

from kvxferd.ids import EngineId
from kvxferd.telemetry.warnings.first_pulls import MAX_PAIRS, NUM_NEXT, SHOWN_FOR_S, SlowFirstPulls
from tests.support.node_samples import pull_record


def pulls(
    handshake_s: float, first_wire_s: float, wire_s: float = 0.01, num_next: int = NUM_NEXT
) -> SlowFirstPulls:
    checked = SlowFirstPulls()
    delivered = pull_record("delivered")
    first = msgspec.structs.replace(
        delivered,
        total_s=handshake_s + first_wire_s,
        phases_s={"handshake": handshake_s, "wire": first_wire_s},
    )
    checked.record(first, 10.0)
    for _ in range(num_next):
        checked.record(msgspec.structs.replace(delivered, total_s=wire_s, phases_s={"wire": wire_s}), 10.0)
    return checked


def test_a_first_pull_that_waited_for_the_handshake_is_named_with_prepare() -> None:
    (finding,) = pulls(0.5, 0.01).findings(11.0)
    assert "waited, up to 0.50 s for the handshake (from prefill-0 to decode-0 " in finding.message
    assert "`prepare`" in finding.remedy


def test_a_first_pull_that_waited_for_a_connection_is_told_from_a_large_one() -> None:
    (finding,) = pulls(0.0, 0.4).findings(11.0)
    assert "a connection" in finding.message
    assert pulls(0.0, 0.4, wire_s=0.2).findings(11.0) == []  # as slow as the others


def test_a_prepared_first_pull_and_one_without_others_to_compare_are_none() -> None:
    assert pulls(0.0, 0.02).findings(11.0) == []
    assert pulls(0.5, 0.5, num_next=NUM_NEXT - 1).findings(11.0) == []


def test_it_is_shown_for_some_minutes_and_found_once() -> None:
    checked = pulls(0.5, 0.01)
    assert checked.findings(10.0 + SHOWN_FOR_S)
    assert checked.findings(10.1 + SHOWN_FOR_S) == []


def test_pairs_are_bounded() -> None:
    checked = SlowFirstPulls()
    for number in range(2 * MAX_PAIRS):
        checked.record(msgspec.structs.replace(pull_record("delivered"), source=EngineId(f"e{number}")), 1.0)
    assert len(checked._firsts) == MAX_PAIRS
