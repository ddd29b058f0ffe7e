"""The last minute in words: nothing that failed is left out, and nothing failed where nothing is said."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.doctor.daemon import answering
from kvxferd.doctor.report import CheckContext, ok, warn
from kvxferd.telemetry.minute_text import describe_failures, describe_rates
from kvxferd.telemetry.samples import LastMinute
from tests.support.node_samples import PEER, samples


def minute(**more: object) -> LastMinute:
    """The sample's, changed."""
    return msgspec.structs.replace(samples().last_minute(), **more)


def test_failures_name_their_codes_and_the_peer() -> None:
    text = describe_failures(
        minute(
            delivered=2479,
            failed=303,
            failure_share=303 / 2782,
            failures={"deadline": 300, "released": 3},
            worst_peer=f"{PEER}#{'ab' * 32}",
        )
    )
    assert text == f"303 of 2,782 pulls (10.9 %): 300 deadline, 3 released; most from {PEER}"


@given(failed=st.integers(0, 10**6))
def test_there_is_a_text_where_there_is_a_failure(failed: int) -> None:
    assert bool(describe_failures(minute(failed=failed))) == (failed > 0)


def test_a_minute_without_a_pull_has_no_times() -> None:
    text = describe_rates(minute(delivered=0, pulled_bytes_per_s=0.0, p50_s=None, p99_s=None))
    assert text.startswith("0 pulls, 0 B/s in, ")
    assert "p50" not in text


class Daemon:
    """Replies to `/v1/status`."""

    def __init__(self, **more: object) -> None:
        node = {"endpoint": PEER}
        self.answer = {
            "version": "0",
            "ready": True,
            "reasons": [],
            "warnings": [],
            "active_warnings": [],
            "node": node,
        } | more

    def get(self, path: str) -> dict[str, object]:
        """The status."""
        assert path == "/v1/status"
        return self.answer


def test_doctor_has_the_daemon_s_verdict() -> None:
    for level, remedy, found in (
        ("bad", "look at it", warn("state", "Pulls fail", "look at it")),
        ("warn", "", warn("state", "Pulls fail", "`kvxferd status` has the rest")),
        ("good", "", ok("state", "Pulls fail")),
    ):
        daemon = Daemon(verdict={"level": level, "text": "Pulls fail", "remedy": remedy})
        assert found in list(answering(CheckContext(None, daemon, {})))  # type: ignore[arg-type]
