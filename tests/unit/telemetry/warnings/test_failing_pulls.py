"""The warning of failing pulls: its share, its commonest code, and its end."""

from __future__ import annotations

from msgspec.structs import replace

from kvxferd.errors import Code
from kvxferd.telemetry.warnings.failing_pulls import (
    MAX_MESSAGE_CHARS,
    REMEDIES,
    WINDOW_S,
    FailingPulls,
)
from kvxferd.wire.endpoint import address_of
from tests.support.node_samples import PEER, pull_record


def pulls(
    num_delivered: int, num_failed: int, code: Code = Code.DEADLINE, now: float = 100.0
) -> FailingPulls:
    checked = FailingPulls()
    for _ in range(num_delivered):
        checked.record(pull_record("delivered"), now)
    for _ in range(num_failed):
        checked.record(pull_record("failed", code), now)
    return checked


def test_a_share_of_failed_pulls_is_named_with_its_code_and_what_to_do() -> None:
    (finding,) = pulls(2479, 303).findings(101.0)
    assert finding.message.startswith("pulls fail: 303 of 2782 in the last minute, all with deadline")
    assert "prefill-0" in finding.message
    assert finding.remedy == REMEDIES[Code.DEADLINE]


def test_one_failed_pull_of_a_quiet_minute_is_named_and_three_of_many_are_not() -> None:
    assert pulls(0, 1).findings(100.5)
    assert pulls(10_000, 3).findings(100.5) == []
    assert pulls(10_000, 0).findings(100.5) == []


def test_cancelled_pulls_do_not_count() -> None:
    checked = FailingPulls()
    checked.record(pull_record("cancelled", Code.CANCELLED), 1.0)
    assert checked.findings(1.0) == []


def test_it_ends_a_minute_after_the_last_failure() -> None:
    checked = pulls(0, 5, now=100.0)
    assert checked.findings(100.0 + WINDOW_S - 1)
    assert checked.findings(100.0 + WINDOW_S) == []


def test_a_share_about_the_limit_does_not_flap() -> None:
    checked = pulls(99, 1)
    assert checked.findings(100.0)
    for _ in range(60):
        checked.record(pull_record("delivered"), 101.0)
    assert checked.findings(101.0)  # 0.6 %, which alone would not begin a warning
    for _ in range(60):
        checked.record(pull_record("delivered"), 102.0)
    assert checked.findings(102.0) == []


def test_the_commonest_reason_is_first_and_the_others_are_counted() -> None:
    checked = pulls(0, 3, Code.RELEASED)
    for _ in range(2):
        checked.record(pull_record("failed", Code.BUSY), 100.0)
    (finding,) = checked.findings(100.0)
    assert "3 of them with released" in finding.message
    assert "others: 2 busy" in finding.message


def test_a_daemon_that_did_not_reply_is_named_in_the_command_to_run() -> None:
    (finding,) = pulls(0, 1, Code.PEER_UNREACHABLE).findings(100.0)
    assert f"run `kvxferd ping {address_of(PEER)}`:" in finding.remedy
    silent = FailingPulls()
    record = replace(pull_record("failed", Code.DEADLINE), silent=address_of(PEER))
    silent.record(record, 100.0)
    (finding,) = silent.findings(100.0)
    assert f"run `kvxferd ping {address_of(PEER)}`:" in finding.remedy


def test_a_long_message_is_quoted_in_part() -> None:
    checked = FailingPulls()
    checked.record(replace(pull_record("failed", Code.BUSY), message="cannot pull: " + "word " * 200), 1.0)
    (finding,) = checked.findings(1.0)
    assert 'The last: "cannot pull: word' in finding.message
    assert finding.message.endswith('word ..."')
    assert len(finding.message) < MAX_MESSAGE_CHARS + 150
