"""The sender's plan: golden row 12, entries worked by hand, and what is refused."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from kvxferd.errors import EngineError, PlanError
from kvxferd.ids import Rank
from kvxferd.layout import EngineSpec, RankLayout, UnitRange
from kvxferd.layout.presets import LayerKind, ModelFacts, TokenComponent, deploy
from kvxferd.plan import SenderPlan, SendPart, SendPattern, sender_plan
from kvxferd.plan.send_pattern import Axis, SendBase, StridedCopy
from kvxferd.plan.send_runs import SendRuns
from tests.support.attention_engines import KV, blocks, engine, plan_between

Engine = dict[Rank, tuple[EngineSpec, RankLayout]]


def sent_by(source: Engine, sink: Engine, producer: int = 0) -> SenderPlan:
    """Return what one producer sends to all ranks of `sink`."""
    consumers = {rank: (held[1], plan_between(sink, source, tuple(rank))) for rank, held in sink.items()}
    rank = Rank(0, producer)
    return sender_plan(rank, source[rank][1], consumers)


def only_pattern(source: Engine, sink: Engine) -> SendPattern:
    """Return the one entry that the first producer has."""
    (pattern,) = sent_by(source, sink).patterns
    return pattern


def listed(runs: SendRuns) -> list[tuple[int, int, int]]:
    """Return runs as (source offset, destination offset, length)."""
    return list(zip(*(column.tolist() for column in runs[3:]), strict=True))


def parts(source: Engine, sink: Engine, producer: int) -> list[tuple[int, int, int, int]]:
    """Return (consumer, source offset, destination offset, length) of what a producer sends of K."""
    sent = sent_by(source, sink, producer).parts()
    first = sent[0].component if sent else ""
    return [(p.consumer.tp_rank, *p[3:]) for p in sent if p.component == first]


def plain(tp: int, heads: int) -> Engine:
    """One layer; a head of a block of 512 tokens has 2048 bytes."""
    return engine(tp=tp, heads=heads, layers=1, block_tokens=512)


def test_one_producer_two_consumers() -> None:
    """GOLDEN row 12: P1 to D2, parts of 4096."""
    assert parts(plain(1, 4), plain(2, 4), 0) == [(0, 0, 0, 4096), (1, 4096, 0, 4096)]


def test_four_producers_two_consumers() -> None:
    """GOLDEN row 12: P4 to D2: ranks 0 to 3 at 0, 4096, 0, 4096."""
    sent = [parts(plain(4, 8), plain(2, 8), producer) for producer in range(4)]
    assert sent == [[(0, 0, 0, 4096)], [(0, 0, 4096, 4096)], [(1, 0, 0, 4096)], [(1, 0, 4096, 4096)]]


def test_replicas_of_mla_do_not_all_send() -> None:
    """GOLDEN row 12: MLA P4 to D2: 0 and 2 send, 1 and 3 do not."""
    latent = TokenComponent("latent", 1, 8, is_replicated=True)
    model = ModelFacts("mla", 0, (LayerKind.FULL,), ((latent,),))
    source, sink = deploy(model, tp=4, num_blocks=2), deploy(model, tp=2, num_blocks=2)
    sent = [parts(source, sink, producer) for producer in range(4)]
    assert [[consumer for consumer, *_ in one] for one in sent] == [[0], [], [1], []]


def test_replicated_heads_are_sent_once() -> None:
    """GOLDEN row 12: P8 to D2, K4: D0 from P0 (slot 0) and P2 (slot 1), D1 from P4 and P6."""
    sent = [parts(plain(8, 4), plain(2, 4), producer) for producer in range(8)]
    assert sent == [
        [(0, 0, 0, 2048)],
        [],
        [(0, 0, 2048, 2048)],
        [],
        [(1, 0, 0, 2048)],
        [],
        [(1, 0, 2048, 2048)],
        [],
    ]


def test_each_unit_is_sent_exactly_once() -> None:
    """Sizes that do not divide: the producers' parts fill each consumer's block without gap or overlap."""
    source, sink = plain(3, 8), plain(2, 8)
    sent = [part for producer in range(3) for part in parts(source, sink, producer)]
    for consumer in range(2):
        filled = sorted((at, at + length) for to, _, at, length in sent if to == consumer)
        assert filled[0][0] == 0
        assert filled[-1][1] == 4 * 2048
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(filled))


def test_parts_name_layer_and_component() -> None:
    """Both, for every consumer."""
    sent = sent_by(engine(layers=2), engine(layers=2)).parts()
    assert sent[0] == SendPart(Rank(0, 0), 0, "k", 0, 0, 64)
    assert [(part.layer, part.component) for part in sent] == [(0, "k"), (0, "v"), (1, "k"), (1, "v")]


# One layer of 4 heads of 4 bytes, 16 blocks of 4 tokens: a block of K has 64 bytes, and V is 1024 further.


def test_an_entry_has_bases_and_a_strided_copy() -> None:
    """HND to NHD: a base for K and one for V, and 4-byte runs along heads and tokens."""
    pattern = only_pattern(engine(layers=1), engine(layers=1, layout="NHD"))
    assert pattern.bases == (
        SendBase(0, "k", 0, 0, 0, 0, 0),
        SendBase(0, "v", 0, 1024, 1024, 0, 0),
    )
    assert pattern.copy == StridedCopy((Axis(4, 16, 4), Axis(4, 4, 16)), 4)  # heads, tokens
    assert pattern.copy.num_bytes == 64
    with pytest.raises(ValueError, match="it takes 16 runs"):
        pattern.parts()


def test_the_bytes_of_nhd_are_all_there() -> None:
    """A rank of two has half of the heads of each token: 8 bytes of 16, token by token."""
    source, sink = engine(layers=1, layout="NHD"), engine(tp=2, layers=1, layout="NHD")
    sender = sent_by(source, sink)
    assert [pattern.copy for pattern in sender.patterns] == [StridedCopy((Axis(4, 16, 8),), 8)] * 2
    assert sum(pattern.num_bytes(4 * 16) for pattern in sender.patterns) == 2048  # the whole cache


@pytest.mark.parametrize(("at_source", "at_sink"), [(4, 8), (8, 4)])
def test_block_sizes_that_divide_move_the_smaller_blocks(at_source: int, at_sink: int) -> None:
    """Head by head, 4 tokens a run: no triple says to which half of the larger block they go."""
    one_head = {"heads": 1, "layers": 1}
    pattern = only_pattern(
        engine(**one_head, block_tokens=at_source), engine(**one_head, block_tokens=at_sink)
    )
    assert pattern.num_items == 4
    assert pattern.copy == StridedCopy((), 16)
    with pytest.raises(ValueError, match=f"blocks of {at_source} and {at_sink} tokens"):
        pattern.parts()


def test_block_sizes_that_do_not_divide_repeat_every_few_tokens() -> None:
    """12 and 16 tokens: 4 tokens lie in one block of each, wherever they begin."""
    one_head = {"heads": 1, "layers": 1}
    pattern = only_pattern(engine(**one_head, block_tokens=12), engine(**one_head, block_tokens=16))
    assert (pattern.num_items, pattern.copy) == (4, StridedCopy((), 16))


def test_runs_of_a_request() -> None:
    """Two blocks of 4 tokens fill the halves of a block of 8; K lies before V on either side."""
    one_head = {"heads": 1, "layers": 1}
    sender = sent_by(engine(**one_head), engine(**one_head, block_tokens=8))
    (runs,) = sender.runs(blocks([3, 9]), blocks([1]), 8)
    assert runs[:3] == (Rank(0, 0), KV, KV)
    assert listed(runs) == [(48, 32, 16), (144, 48, 16), (304, 544, 16), (400, 560, 16)]


def test_neighbouring_blocks_are_one_run() -> None:
    """Ids in a row on both sides."""
    one_head = {"heads": 1, "layers": 1}
    (runs,) = sent_by(engine(**one_head), engine(**one_head)).runs(blocks([4, 5, 6]), blocks([8, 9, 10]), 12)
    assert listed(runs) == [(64, 128, 48), (320, 384, 48)]


def test_long_requests_come_in_parts() -> None:
    """Of at most as many runs as are asked for; together they are the same bytes."""
    sender = sent_by(engine(layers=1), engine(layers=1, layout="NHD"))
    here, there = blocks(range(0, 16, 2)), blocks(range(1, 16, 2))
    parts = list(sender.runs(here, there, 32, max_runs=64))
    assert [len(part.length) for part in parts] == [64] * 4
    (whole,) = sender.runs(here, there, 32)
    assert sorted(run for part in parts for run in listed(part)) == sorted(listed(whole))


def test_chunks_that_divide_are_one_entry() -> None:
    """A head's content of 12 bytes, in 3 chunks here and in 6 there."""
    assert [p.copy for p in chunked((4, 100), (2, 50))] == [
        StridedCopy((Axis(3, 100, 100), Axis(2, 2, 50)), 2)
    ]


def test_chunks_that_do_not_divide_take_an_entry_for_each_piece() -> None:
    """Chunks of 4 and of 6 bytes: cuts at 4, 6 and 8 of 12."""
    found = [(p.bases[0], p.copy.length) for p in chunked((4, 100), (6, 50))]
    pieces = [(base.source_offset, base.destination_offset, length) for base, length in found]
    assert pieces == [(0, 0, 4), (100, 4, 2), (102, 50, 2), (200, 52, 4)]


def test_chunks_in_countless_pieces_are_refused() -> None:
    """Before there is a list of them: chunks of 2^20 - 1 bytes against 2^20, 2^21 pieces."""
    size = (1 << 20) * ((1 << 20) - 1)
    with pytest.raises(PlanError, match="into 2097150 pieces, over 262144"):
        chunked(((1 << 20) - 1, 1 << 20), (1 << 20, 1 << 20), size)


def chunked(at_source: tuple[int, int], at_sink: tuple[int, int], size: int = 12) -> tuple[SendPattern, ...]:
    """Return the entries of one token of K, given (chunk bytes, chunk stride) of both sides."""
    sides = []
    for chunk_bytes, chunk_stride in (at_source, at_sink):
        ((rank, (spec, layout)),) = engine(heads=1, layers=1, block_tokens=1).items()
        tensor = msgspec.structs.replace(
            layout.tensors[0],
            chunk_bytes=chunk_bytes,
            num_chunks=size // chunk_bytes,
            chunk_stride=chunk_stride,
        )
        sides.append({rank: (spec, msgspec.structs.replace(layout, tensors=(tensor,)))})
    return sent_by(*sides).patterns


def test_what_the_source_lacks_is_refused() -> None:
    """Before anything is sent, as the consumer would refuse to read it."""
    sender = sent_by(engine(layers=1), engine(layers=1))
    with pytest.raises(PlanError, match=r"tokens \[0, 8\) are needed, and \[4, 8\) are published"):
        next(sender.runs(blocks([3], first_token=4), blocks([1, 2]), 8))


def test_ids_that_a_side_cannot_have_are_refused() -> None:
    """A push to block 16 of 16 would write outside of the consumer's memory."""
    sender = sent_by(engine(layers=1), engine(layers=1))
    for here, there in (([3], [16]), ([-1], [3])):
        with pytest.raises(EngineError, match="its ids are 0 to 15"):
            next(sender.runs(blocks(here), blocks(there), 4))


def test_a_plan_of_other_layouts_is_refused() -> None:
    """A tensor that is not there, another content, units that the producer does not hold, or not in a row."""
    source, sink = engine(layers=1), engine(layers=1)
    layout = source[Rank(0, 0)][1]
    consumers = {Rank(0, 0): (sink[Rank(0, 0)][1], plan_between(sink, source))}
    smaller = tuple(msgspec.structs.replace(tensor, chunk_bytes=2) for tensor in layout.tensors)
    apart = (UnitRange(0, 2), UnitRange(3, 5))
    gapped = tuple(msgspec.structs.replace(tensor, units=apart) for tensor in layout.tensors)
    others = [
        msgspec.structs.replace(layout, tensors=gapped),
        msgspec.structs.replace(layout, tensors=()),
        msgspec.structs.replace(layout, tensors=smaller),
        engine(layers=1, tp=2)[Rank(0, 1)][1],
    ]
    for other in others:
        with pytest.raises(PlanError, match="cannot plan what is sent"):
            sender_plan(Rank(0, 0), other, consumers)
