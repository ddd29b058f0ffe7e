"""The last lines of the log stay within their bounds, and errors are not pushed out by ordinary lines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvxferd.telemetry.recent_lines import (
    MAX_CHARS,
    MAX_ERROR_CHARS,
    MAX_ERROR_LINES,
    MAX_LINE_CHARS,
    MAX_LINES,
    RecentLines,
)


@given(st.lists(st.tuples(st.sampled_from([0, 1, 100, 10_000, 100_000]), st.booleans(), st.integers(1, 300))))
def test_what_is_kept_is_bounded(added: list[tuple[int, bool, int]]) -> None:
    recent = RecentLines()
    for length, is_error, times in added:
        for _ in range(times):
            recent.add("x" * length, is_error)
    for kept, max_lines, max_chars in (
        (recent.lines(), MAX_LINES, MAX_CHARS),
        (recent.errors(), MAX_ERROR_LINES, MAX_ERROR_CHARS),
    ):
        assert len(kept) <= max_lines
        assert sum(map(len, kept)) <= max_chars
        assert all(len(line) <= MAX_LINE_CHARS for line in kept)


def test_the_newest_lines_stay_and_errors_beside_them() -> None:
    recent = RecentLines()
    recent.add("the error", is_error=True)
    for number in range(MAX_LINES + 10):
        recent.add(str(number))
    assert recent.lines()[0] == "10"
    assert recent.lines()[-1] == str(MAX_LINES + 9)
    assert recent.errors() == ["the error"]
