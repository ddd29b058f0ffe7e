"""A reader gets the metadata of all ranks, or is refused if it is not PP-aware and there are stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.core import Settings
from kvxferd.core.handshake_metadata import aggregate_metadata
from kvxferd.errors import Code, NotPPAwareError
from kvxferd.ids import Rank
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.peer import FetchEngine
from tests.support.simulation import IDS, SINK_IDS, TOKENS, Host, Worker, World

PLACES = st.builds(Rank, st.integers(0, 3), st.integers(0, 3))


@given(st.lists(st.none() | st.dictionaries(PLACES, st.integers()), max_size=6), st.booleans())
def test_every_rank_reaches_a_reader_that_knows_stages_and_no_later_stage_one_that_does_not(
    workers: list[Mapping[Rank, int] | None], pp_aware: bool
) -> None:
    expected: dict[Rank, int] = {}
    for worker in workers:
        expected |= worker or {}
    if not pp_aware and any(pp_rank for pp_rank, _ in expected):
        with pytest.raises(NotPPAwareError, match=r"to the reader: .*peer\.pp_aware") as caught:
            aggregate_metadata(workers, "the reader", pp_aware)
        assert caught.value.code is Code.NOT_PP_AWARE
        return
    merged = aggregate_metadata(workers, "the reader", pp_aware)
    assert merged == expected
    assert list(merged) == sorted(expected)
    assert all(isinstance(rank, Rank) for rank in merged)


def two_nodes(**sink_settings: bool) -> tuple[World, Host, Host]:
    """Return a world, a source that is PP-aware, and a sink with those settings."""
    world = World()
    source = world.host("p")
    world.settings = replace(Settings(), **sink_settings)
    return world, source, world.host("d")


def pull(sources: list[Worker], sink: Worker) -> wk.Delivered | wk.PullFailed | None:
    """Publish at the source, read at the sink; return how the pull ended."""
    ref = sources[0].publish("t1", IDS, TOKENS)
    for source in sources[1:]:
        source.ready("t1")
    return sink.ended(sink.pull(ref, SINK_IDS, TOKENS))


def test_a_node_that_is_not_pp_aware_is_refused_by_the_source_with_what_to_do() -> None:
    world, source, sink = two_nodes(pp_aware=False)
    sources, (reader,) = world.engine(source, "prefill", pp=2), world.engine(sink, "decode")
    world.hold_network = True
    ref = sources[0].publish("t1", IDS, TOKENS)
    ticket = reader.pull(ref, SINK_IDS, TOKENS)
    sent = [PEER_MESSAGES.decode(envelope.payload) for envelope in world.network]
    world.hold_network = False
    world.settle()
    failed = reader.ended(ticket)
    assert failed.code is Code.NOT_PP_AWARE
    assert "the asking node" in failed.message
    assert "peer.pp_aware" in failed.message
    assert not any(message.pp_aware for message in sent if isinstance(message, FetchEngine))
    assert reader.num_wrong(SINK_IDS, TOKENS, seed=1)  # nothing moved


def test_it_refuses_the_stages_itself_where_the_source_does_not() -> None:
    world, source, sink = two_nodes(pp_aware=False)
    sources, (reader,) = world.engine(source, "prefill", pp=2), world.engine(sink, "decode")
    arrive: Callable[..., None] = world.arrive

    def arrive_changed(envelope) -> None:  # type: ignore[no-untyped-def]
        message = PEER_MESSAGES.decode(envelope.payload)
        if isinstance(message, FetchEngine):
            envelope = replace(envelope, payload=encode(msgspec.structs.replace(message, pp_aware=True)))
        arrive(envelope)

    world.arrive = arrive_changed  # type: ignore[method-assign]
    failed = pull(sources, reader)
    assert failed.code is Code.NOT_PP_AWARE
    assert "this node" in failed.message
    assert "peer.pp_aware" in failed.message


def test_it_reads_engines_of_one_stage_and_its_own_stages_are_read() -> None:
    world, aware, legacy = two_nodes(pp_aware=False)
    sources, (reader,) = world.engine(aware, "prefill", tp=2), world.engine(legacy, "decode")
    assert isinstance(pull(sources, reader), wk.Delivered)
    staged, (other,) = world.engine(legacy, "staged", pp=2), world.engine(aware, "turn-2")
    assert isinstance(pull(staged, other), wk.Delivered)
