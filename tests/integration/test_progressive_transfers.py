"""Pulls that read while the source writes: real daemons, movers and memory, of another layout and block size.

Where the source has not written, its memory holds other bytes than the request's: none may be delivered.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.nodes.agent import blocks
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.rank_process import RankProcess
from tests.support.nodes.requests import spec_of
from tests.support.nodes.waiting import wait_until

REQUEST, NUM_TOKENS = 1, 330
TOKEN_BYTES = 2 * 4 * 8 * 128 * 2  # of `spec_of` with that head_dim: 64 tokens are a piece, 1 MiB
PREFILL: dict[str, Any] = {"head_dim": 128, "block_tokens": 16, "num_blocks": 24, "layout": "HND"}
DECODE = PREFILL | {"block_tokens": 32, "num_blocks": 12, "layout": "NHD"}
SOURCE_IDS = list(range(23, 2, -1))  # 21 blocks
SINK_IDS = [5, 0, 7, 2, 9, 11, 1, 3, 10, 4, 8]
READ_BYTES = len(SOURCE_IDS) * 16 * TOKEN_BYTES  # whole blocks of the source


@pytest.fixture
def nodes(fleet: Fleet) -> tuple[Daemon, Daemon]:
    return fleet.shared("prefill"), fleet.shared("decode")


@pytest.fixture
def ranks(fleet: Fleet, nodes: tuple[Daemon, Daemon]) -> tuple[RankProcess, RankProcess]:
    """A source and a sink, each with a daemon of its own."""
    (source,) = fleet.engine(nodes[0], spec_of("prefill"), **PREFILL)
    (sink,) = fleet.engine(nodes[1], spec_of("decode"), **DECODE)
    return source, sink


def extend(source: RankProcess, before: int, ready: int) -> None:
    """Write the tokens, then report them and the blocks that they add."""
    source.write(REQUEST, SOURCE_IDS, ready, start=before)
    added = SOURCE_IDS[-(-before // 16) : -(-ready // 16)]
    source.ready("t1", None if ready == NUM_TOKENS else ready, blocks(added, NUM_TOKENS))


def wait_until_read(decode: Daemon, num_tokens: int) -> None:
    """Wait until the one pull has read so many tokens."""
    pulls = lambda: decode.control.get("/v1/transfers")["pulls"]  # noqa: E731
    wait_until(lambda: [p["tokens_read"] for p in pulls()] == [num_tokens], f"{num_tokens} tokens read")


def check_shown(nodes: tuple[Daemon, Daemon], ready: int, read: int) -> None:
    """Check what both daemons show between two pieces."""
    (transfer,) = nodes[0].control.get("/v1/transfers")["transfers"]
    assert (transfer["ready_tokens"], transfer["num_tokens"]) == (ready, NUM_TOKENS)
    (pull,) = nodes[1].control.get("/v1/transfers")["pulls"]
    assert (pull["tokens_read"], pull["num_tokens"]) == (read, NUM_TOKENS)
    assert pull["bytes_read"] == read * TOKEN_BYTES


def test_each_chunk_is_read_when_it_is_ready(
    nodes: tuple[Daemon, Daemon], ranks: tuple[RankProcess, RankProcess]
) -> None:
    (source, sink), decode = ranks, nodes[1]
    ref = source.publish("t1", [], NUM_TOKENS, ready_tokens=0)
    ticket = sink.pull(ref, SINK_IDS, NUM_TOKENS, progressive=True)
    before = 0
    for ready in (70, 150, 250):  # each more than a piece: 64, 128 and 224 tokens of whole blocks
        extend(source, before, ready)
        before = ready
        read = ready // 32 * 32
        wait_until_read(decode, read)
        assert sink.num_wrong(REQUEST, SINK_IDS[: read // 32], read) == 0
        assert sink.num_spilled(SINK_IDS[: read // 32]) == 0, "more was read than was ready"
    check_shown(nodes, ready=250, read=224)
    extend(source, before, NUM_TOKENS)
    name, fields = sink.end_of(ticket)
    assert (name, fields["bytes"]) == ("Delivered", READ_BYTES)
    assert sink.num_wrong(REQUEST, SINK_IDS, NUM_TOKENS) == 0
    # The record and the metrics come behind the delivery.
    (record,) = decode.history(kind="pull")
    assert (record["bytes"], record["hidden_bytes"]) == (READ_BYTES, 224 * TOKEN_BYTES)
    assert decode.counted("kvxferd_hidden_bytes_total") == 224 * TOKEN_BYTES
    assert decode.counted("kvxferd_handover_seconds_count") == 1
    assert source.await_event("Released") == {"transfer_id": "t1", "why": "completed"}


def test_what_is_preempted_is_never_delivered(
    nodes: tuple[Daemon, Daemon], ranks: tuple[RankProcess, RankProcess]
) -> None:
    source, sink = ranks
    source.write(REQUEST, SOURCE_IDS, 160)
    ref = source.publish("t1", SOURCE_IDS[:10], NUM_TOKENS, ready_tokens=160)
    ticket = sink.pull(ref, SINK_IDS, NUM_TOKENS, progressive=True)
    wait_until_read(nodes[1], 160)
    source.unpublish(ref)
    source.await_event("Released")
    source.scribble()  # another request's
    name, fields = sink.end_of(ticket)
    assert (name, fields["code"], fields["safe_to_reuse"]) == ("Failed", "released", True)
