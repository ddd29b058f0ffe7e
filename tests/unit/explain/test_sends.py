"""What each prefill rank sends: by the sender's plan, and equal to what decode ranks read of it."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kvxferd.explain.formatting import format_load
from kvxferd.explain.sends import RankSends, Send
from kvxferd.ids import Rank
from tests.support.explained_pairs import explained

PAIRS = [
    ("llama-3-70b,tp=8,pp=2", "llama-3-70b,tp=4,layout=NHD"),
    ("llama-3-70b,tp=3,pp=3,block_tokens=12", "llama-3-70b,tp=5,layout=NHD"),
    ("llama-3-8b,layout=NHD", "llama-3-8b,tp=2,layout=NHD,block_tokens=32"),
    ("llama-3-8b,layout=cross-layer", "llama-3-8b,layout=packed,tp=2"),
    ("llama-3-8b,tp=2,layout=vectorised", "llama-3-8b,tp=16"),
    ("llama-3-8b,cp=3,interleave=3,block_tokens=6", "llama-3-8b,cp=2,block_tokens=16"),
    ("llama-3-8b,cp=2,interleave=4", "llama-3-8b,cp=2,interleave=4,tp=2"),
    ("deepseek-v3.2,tp=8", "deepseek-v3.2,tp=4,pp=2,block_tokens=64"),
    ("deepseek-v3,cp=4,kv_dtype=fp8", "deepseek-v3,tp=2,kv_dtype=fp8"),
    ("gpt-oss,tp=2", "gpt-oss,tp=4,layout=NHD"),
    ("gemma-3,tp=2", "gemma-3,tp=3,pp=2"),
    ("nemotron-h-8b,tp=16", "nemotron-h-8b,tp=3,layout=HND+SD"),
    ("nemotron-h-8b,pages=own", "nemotron-h-8b,tp=4,block_tokens=32"),
    ("qwen3-next,tp=4,pp=2", "qwen3-next,tp=2"),
    ("falcon-mamba-7b,tp=2", "falcon-mamba-7b,tp=4,pp=2"),
    ("tiny-quantised,tp=2", "tiny-quantised,layout=NHD,block_tokens=8"),
]


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
@pytest.mark.parametrize("is_swapped", [False, True])
def test_each_pair_of_ranks_sends_what_it_reads(prefill: str, decode: str, is_swapped: bool) -> None:
    """Two computations, one sum: bytes and runs of attention and state together."""
    found = explained(decode, prefill) if is_swapped else explained(prefill, decode)
    read: dict[tuple[Rank, Rank], tuple[int, int]] = {}
    for rank in found.ranks:
        for one in rank.reads:
            num_bytes, num_runs = read.get((one.source, rank.rank), (0, 0))
            read[one.source, rank.rank] = (num_bytes + one.num_bytes, num_runs + one.num_runs)
    sent = {
        (sends.rank, send.decode_rank): (send.num_bytes, send.num_runs)
        for sends in found.sends
        for send in sends.to
    }
    assert sent == read
    assert [sends.rank for sends in found.sends] == sorted(found.prefill.ranks)


def test_bytes_of_uneven_heads() -> None:
    """Three ranks with 3, 3 and 2 of 8 heads, four readers of 2: 80 layers, K and V, 256 bytes a head."""
    head = 80 * 2 * 128 * 2 * 1000
    found = explained("llama-3-70b,tp=3", "llama-3-70b,tp=4")
    sent = [[(send.decode_rank.tp_rank, send.num_bytes) for send in sends.to] for sends in found.sends]
    assert sent == [[(0, 2 * head), (1, head)], [(1, head), (2, 2 * head)], [(3, 2 * head)]]


def test_runs_of_unlike_layouts() -> None:
    """Head by head and token by token: 1,000 tokens of 4 heads of K and V in 32 layers, for each reader."""
    found = explained("llama-3-8b", "llama-3-8b,tp=2,layout=NHD")
    assert found.sends == (
        RankSends(
            Rank(0, 0),
            tuple(Send(Rank(0, tp), 32 * 2 * 4 * 256 * 1000, 32 * 2 * 4 * 1000) for tp in (0, 1)),
        ),
    )


def test_shards_of_tokens_are_counted_in_whole_bytes() -> None:
    """A third of the tokens in granules that do not divide them: rounded to a byte once, like a read."""
    found = explained("llama-3-8b,cp=3,interleave=3,block_tokens=6", "llama-3-8b")
    exact = Fraction(32 * 2 * 8 * 256 * 1000, 3)
    assert {send.num_bytes for sends in found.sends for send in sends.to} == {round(exact)}


def test_idle_replicas_send_nothing() -> None:
    """They are listed, with nobody to send to."""
    found = explained("deepseek-v3,tp=8", "deepseek-v3,tp=4")
    assert [sends.rank.tp_rank for sends in found.sends if not sends.to] == [1, 3, 5, 7]
    assert format_load(found) == (
        "the busiest prefill ranks are pp0.tp0+2+4+6 with 67.0 MiB each, 2.0 times the mean; "
        "not read at all: pp0.tp1+3+5+7"
    )


def test_one_busiest_rank() -> None:
    """A stage of two layers beside one of 30."""
    found = explained("llama-3-8b,pp=2,stages=30+2", "llama-3-8b")
    assert format_load(found) == "the busiest prefill rank is pp0.tp0 with 117.2 MiB, 1.9 times the mean"
