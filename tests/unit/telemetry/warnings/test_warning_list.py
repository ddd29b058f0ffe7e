"""The list of warnings: each begins and ends once, keeps its time, and stays bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvxferd.telemetry.warnings.kinds import HOLD_S, WarningKind
from kvxferd.telemetry.warnings.warning_list import (
    MAX_SUBJECT_CHARS,
    MAX_WARNINGS_PER_KIND,
    WarningCondition,
    WarningList,
    finding_of,
)

UNIX = 1_790_000_000.0


def placement(subject: str = "staged: 1", message: str = "it is slow") -> WarningCondition:
    return WarningCondition(WarningKind.PLACEMENT, subject, message, "look at it")


def changes_of(warnings: WarningList, now: float, *findings: WarningCondition) -> list[tuple[str, str]]:
    return [(c.what, c.warning.subject) for c in warnings.update(findings, now, UNIX + now)]


def test_a_warning_begins_once_and_keeps_its_time_while_its_message_is_renewed() -> None:
    warnings = WarningList()
    assert changes_of(warnings, 5.0, placement()) == [("began", "staged: 1")]
    assert changes_of(warnings, 6.0, placement(message="it is slow still")) == []
    (warning,) = warnings.warnings()
    assert warning.since == UNIX + 5.0
    assert warning.text == "it is slow still; look at it"
    assert warning.page == "docs/how-to/when-something-is-wrong.md#placement"
    assert warnings.count(WarningKind.PLACEMENT) == 1


def test_a_warning_ends_once_after_its_hold_and_a_gap_below_it_is_none() -> None:
    warnings = WarningList()
    changes_of(warnings, 0.0, placement())
    assert changes_of(warnings, HOLD_S - 0.1) == []
    assert changes_of(warnings, HOLD_S, placement()) == []
    assert changes_of(warnings, 2 * HOLD_S - 0.1) == []
    (change,) = warnings.update([], 2 * HOLD_S, UNIX)
    assert (change.what, change.lasted_s) == ("ended", 2 * HOLD_S)
    assert warnings.warnings() == []
    assert warnings.count(WarningKind.PLACEMENT) == 0


def test_a_setting_s_warning_ends_with_the_setting() -> None:
    warnings = WarningList()
    changes_of(warnings, 0.0, WarningCondition(WarningKind.PEER_SOCKET_OPEN, "", "open"))
    assert changes_of(warnings, 0.1) == [("ended", "")]


def test_warnings_of_a_kind_are_bounded_and_the_first_stay() -> None:
    warnings = WarningList()
    found = [placement(f"staged: {n}") for n in range(2 * MAX_WARNINGS_PER_KIND)]
    assert len(changes_of(warnings, 0.0, *found)) == MAX_WARNINGS_PER_KIND
    assert changes_of(warnings, 1.0, *reversed(found)) == []
    assert [w.subject for w in warnings.warnings()] == [p.subject for p in found[:MAX_WARNINGS_PER_KIND]]
    assert changes_of(warnings, 1.0, WarningCondition(WarningKind.CARD_UNUSED, "x", "unused")) == [
        ("began", "x")
    ]


def test_a_stranger_s_name_is_cut_and_without_control_characters() -> None:
    warnings = WarningList()
    warnings.update([placement("\x1b[31m" + "x" * 5000, "red \x1b[31m\nline")], 0.0, UNIX)
    (warning,) = warnings.warnings()
    assert len(warning.subject) == MAX_SUBJECT_CHARS
    assert warning.subject.isprintable()
    assert warning.message.isprintable()
    # The same name is the same warning the next time.
    assert warnings.update([placement("\x1b[31m" + "x" * 5000)], 1.0, UNIX) == []


def test_a_sentence_is_split_at_its_remedy_and_joined_again() -> None:
    sentence = "memory is reached slowly: no dma-buf; load the module; restart"
    finding = finding_of(WarningKind.PLACEMENT, "", sentence)
    assert finding.remedy == "load the module; restart"
    warnings = WarningList()
    warnings.update([finding], 0.0, UNIX)
    assert warnings.warnings()[0].text == sentence


@given(
    st.lists(st.tuples(st.floats(0.0, 30.0), st.sets(st.sampled_from(range(40)), max_size=40)), max_size=30)
)
def test_each_end_follows_its_beginning_and_the_counts_are_those_of_the_list(
    steps: list[tuple[float, set[int]]],
) -> None:
    warnings, now, open_warnings = WarningList(), 0.0, set()
    for step_s, found in steps:
        now += step_s
        for change in warnings.update([placement(f"p{n}") for n in sorted(found)], now, UNIX):
            if change.what == "began":
                assert change.warning.subject not in open_warnings
                open_warnings.add(change.warning.subject)
            else:
                open_warnings.remove(change.warning.subject)
        assert {w.subject for w in warnings.warnings()} == open_warnings
        assert warnings.count(WarningKind.PLACEMENT) == len(open_warnings) <= MAX_WARNINGS_PER_KIND
