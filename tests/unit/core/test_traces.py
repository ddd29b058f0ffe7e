"""Which trace a transfer belongs to, on both nodes: parents and ids of the spans that records become."""

from __future__ import annotations

import pytest

from kvxferd.core.settings import Settings
from kvxferd.core.snapshot import GrantRecord, PullRecord, ReleaseRecord
from kvxferd.core.traces import sampled_trace
from kvxferd.wire import worker as wk
from kvxferd.wire.common import TransferRef
from kvxferd.wire.traceparent import parent_id_of, root_traceparent, span_id_for, trace_id_of
from tests.support.simulation import IDS, SINK_IDS, TOKENS, World

TRACE = "1" * 32
PREFILL, DECODE = f"00-{TRACE}-{'a' * 16}-01", f"00-{TRACE}-{'b' * 16}-01"
QUIET = f"00-{TRACE}-{'b' * 16}-00"


class Pair:
    """A prefill and a decode node with one rank each."""

    def __init__(self, **settings: object) -> None:
        self.world = World(settings=Settings(**({"tracing": True} | settings)))  # type: ignore[arg-type]
        self.prefill, self.decode = self.world.host("p"), self.world.host("d")
        (self.source,) = self.world.engine(self.prefill, "prefill")
        (self.sink,) = self.world.engine(self.decode, "decode")

    def publish(self, traceparent: str = PREFILL, name: str = "t1") -> TransferRef:
        return self.source.publish(name, IDS, TOKENS, traceparent=traceparent)

    def pull(self, ref: TransferRef, traceparent: str = DECODE) -> wk.Delivered | wk.Failed:
        ticket = self.sink.pull(ref.with_trace(traceparent), SINK_IDS, TOKENS, deadline_s=30.0)
        self.world.settle()
        self.world.advance(40.0)
        ended = self.sink.ended(ticket)
        assert isinstance(ended, wk.Delivered | wk.Failed)
        return ended

    def pulls(self) -> list[PullRecord]:
        return [record for record in self.decode.records if isinstance(record, PullRecord)]

    def releases(self) -> list[ReleaseRecord]:
        return [record for record in self.prefill.records if isinstance(record, ReleaseRecord)]

    @property
    def grants(self) -> list[GrantRecord]:
        return self.prefill.traced_grants


def test_the_sources_spans_hang_on_the_readers_and_each_on_its_request() -> None:
    pair = Pair()
    assert isinstance(pair.pull(pair.publish()), wk.Delivered)
    (pull,), (release,), (grant,) = pair.pulls(), pair.releases(), pair.grants
    assert (pull.traceparent, release.traceparent) == (DECODE, PREFILL)
    assert trace_id_of(grant.traceparent) == TRACE
    assert parent_id_of(grant.traceparent) == pull.span_id
    assert len({pull.span_id, release.span_id, grant.span_id}) == 3
    assert (grant.outcome, grant.reader, grant.code) == ("acknowledged", "decode", None)
    assert pair.decode.traced_grants == []


def test_a_prepared_pull_is_the_parent_too() -> None:
    pair = Pair()
    ref = pair.publish()
    pair.sink.say(wk.Prepare(ref=ref.with_trace(PREFILL)))
    pair.world.settle()
    assert isinstance(pair.pull(ref, DECODE), wk.Delivered)
    (pull,), (grant,) = pair.pulls(), pair.grants
    assert pull.traceparent == DECODE
    assert parent_id_of(grant.traceparent) == pull.span_id
    assert len([m for m in pair.sink.inbox if isinstance(m, wk.Delivered)]) == 1


def test_a_refusal_has_a_span_for_a_reader_that_has_the_reference() -> None:
    pair = Pair()
    ref = pair.publish()
    pair.source.say(wk.Unpublish(transfer_id="t1"))
    pair.world.settle()
    failed = pair.pull(ref)
    assert isinstance(failed, wk.Failed)
    (pull,), (grant,) = pair.pulls(), pair.grants
    assert (grant.outcome, grant.code) == ("refused", failed.code)
    assert parent_id_of(grant.traceparent) == pull.span_id
    assert pull.failed_phase == "grant"


@pytest.mark.parametrize("how", ["nonce", "transfer_id"])
def test_a_stranger_makes_no_span(how: str) -> None:
    pair = Pair()
    ref = pair.publish()
    wrong = TransferRef(**{f: getattr(ref, f) for f in ref.__struct_fields__} | {how: "0" * 32})
    assert isinstance(pair.pull(wrong), wk.Failed)
    assert pair.grants == []


@pytest.mark.parametrize("traceparent", ["", QUIET, "x", "0" * 55, f"00-{'0' * 32}-{'a' * 16}-01"])
@pytest.mark.parametrize("tracing", [True, False])
def test_what_is_not_sampled_or_not_valid_makes_none_and_is_delivered(
    traceparent: str, tracing: bool
) -> None:
    pair = Pair(tracing=tracing)
    assert isinstance(pair.pull(pair.publish(traceparent), traceparent), wk.Delivered)
    (pull,), (release,) = pair.pulls(), pair.releases()
    assert (pull.traceparent, pull.span_id, release.traceparent, release.span_id) == ("", "", "", "")
    assert pair.grants == []


def test_a_node_that_exports_nothing_hands_the_trace_on_as_it_is() -> None:
    pair = Pair(tracing=False)
    asked: list[str] = []
    seen = pair.prefill.node.grant_server.acquire
    pair.prefill.node.grant_server.acquire = (  # type: ignore[method-assign]
        lambda route, message, key="": (asked.append(message.ref.traceparent), seen(route, message, key))[1]
    )
    assert isinstance(pair.pull(pair.publish()), wk.Delivered)
    assert asked == [DECODE]
    assert pair.grants == []


def test_a_transfer_that_was_prepared_is_abandoned_whichever_trace_its_reference_names() -> None:
    pair = Pair()
    ref = pair.publish()
    pair.sink.say(wk.Prepare(ref=ref.with_trace(DECODE)))
    pair.world.settle()
    (session,) = [s for s in pair.decode.node.sessions.values() if s.prepared]
    pair.sink.say(wk.Abandon(ref=ref.with_trace(PREFILL)))
    pair.world.settle()
    assert not session.prepared
    assert [release.why for release in pair.releases()] == ["abandoned"]


def test_transfers_without_a_trace_start_one_by_ratio() -> None:
    pair = Pair(trace_sample_ratio=1.0)
    ref = pair.publish("")
    assert isinstance(pair.pull(ref, ""), wk.Delivered)
    (pull,), (release,), (grant,) = pair.pulls(), pair.releases(), pair.grants
    root = root_traceparent(ref.nonce, 1.0)
    assert pull.traceparent == release.traceparent == root
    assert release.span_id == parent_id_of(root) == span_id_for(ref.nonce)
    assert parent_id_of(grant.traceparent) == pull.span_id
    assert ref.nonce not in str(pull) + str(release) + str(grant)


def test_a_requests_own_flag_is_stronger_than_the_ratio() -> None:
    on = Settings(tracing=True, trace_sample_ratio=1.0)
    assert sampled_trace(on, QUIET, "n") == ""
    assert sampled_trace(on, DECODE, "n") == DECODE
    assert sampled_trace(on, "", "n") == root_traceparent("n", 1.0)
    assert sampled_trace(Settings(tracing=True), "", "n") == ""
    assert sampled_trace(Settings(trace_sample_ratio=1.0), DECODE, "n") == ""
