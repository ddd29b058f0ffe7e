"""Which trace a transfer belongs to, on both nodes: parents and ids of the spans that records become."""

from __future__ import annotations

import pytest

from kvxferd.config.schema import TracingConfig
from kvxferd.core.settings import Settings
from kvxferd.records import PullRecord, ReleaseRecord
from kvxferd.wire import worker as wk
from kvxferd.wire.common import TransferRef
from kvxferd.wire.traceparent import parent_id_of, root_traceparent, span_id_for
from tests.support.simulation import IDS, SINK_IDS, TOKENS, World

TRACE = "1" * 32
PREFILL, DECODE = f"00-{TRACE}-{'a' * 16}-01", f"00-{TRACE}-{'b' * 16}-01"
ON, ALL = TracingConfig(endpoint="http://c:4318"), TracingConfig(endpoint="http://c:4318", sample_ratio=1.0)
QUIET = f"00-{TRACE}-{'b' * 16}-00"


class Pair:
    """A prefill and a decode node with one rank each."""

    def __init__(self, tracing: TracingConfig = ON) -> None:
        self.world = World(settings=Settings(tracing=tracing))
        self.prefill, self.decode = self.world.host("p"), self.world.host("d")
        (self.source,) = self.world.engine(self.prefill, "prefill")
        (self.sink,) = self.world.engine(self.decode, "decode")

    def publish(self, traceparent: str = PREFILL, name: str = "t1") -> TransferRef:
        return self.source.publish(name, IDS, TOKENS, traceparent=traceparent)

    def pull(self, ref: TransferRef, traceparent: str = DECODE) -> wk.TicketDelivered | wk.TicketFailed:
        ticket = self.sink.pull(ref.with_trace(traceparent), SINK_IDS, TOKENS, deadline_s=30.0)
        self.world.settle()
        self.world.advance(40.0)
        ended = self.sink.ended(ticket)
        assert isinstance(ended, wk.TicketDelivered | wk.TicketFailed)
        return ended

    def pulls(self) -> list[PullRecord]:
        return [record for record in self.decode.records if isinstance(record, PullRecord)]

    def releases(self) -> list[ReleaseRecord]:
        return [record for record in self.prefill.records if isinstance(record, ReleaseRecord)]


def test_each_sides_span_hangs_on_its_own_request() -> None:
    pair = Pair()
    assert isinstance(pair.pull(pair.publish()), wk.TicketDelivered)
    (pull,), (release,) = pair.pulls(), pair.releases()
    assert (pull.traceparent, release.traceparent) == (DECODE, PREFILL)
    assert len({pull.span_id, release.span_id, ""}) == 3


@pytest.mark.parametrize("traceparent", ["", QUIET, "x", "0" * 55, f"00-{'0' * 32}-{'a' * 16}-01"])
@pytest.mark.parametrize("tracing", [ON, TracingConfig()], ids=["on", "off"])
def test_what_is_not_sampled_or_not_valid_makes_none_and_is_delivered(
    traceparent: str, tracing: TracingConfig
) -> None:
    pair = Pair(tracing)
    assert isinstance(pair.pull(pair.publish(traceparent), traceparent), wk.TicketDelivered)
    (pull,), (release,) = pair.pulls(), pair.releases()
    assert (pull.traceparent, pull.span_id, release.traceparent, release.span_id) == ("", "", "", "")


def test_transfers_without_a_trace_start_one_by_ratio() -> None:
    pair = Pair(ALL)
    ref = pair.publish("")
    assert isinstance(pair.pull(ref, ""), wk.TicketDelivered)
    (pull,), (release,) = pair.pulls(), pair.releases()
    root = root_traceparent(ref.nonce, 1.0)
    assert pull.traceparent == release.traceparent == root
    assert release.span_id == parent_id_of(root) == span_id_for(ref.nonce)
    assert ref.nonce not in str(pull) + str(release)


def test_a_requests_own_flag_is_stronger_than_the_ratio() -> None:
    on = Settings(tracing=ALL)
    assert on.sampled_trace(QUIET, "n") == ""
    assert on.sampled_trace(DECODE, "n") == DECODE
    assert on.sampled_trace("", "n") == root_traceparent("n", 1.0)
    assert Settings(tracing=ON).sampled_trace("", "n") == ""
    assert Settings(tracing=TracingConfig(sample_ratio=1.0)).sampled_trace(DECODE, "n") == ""
