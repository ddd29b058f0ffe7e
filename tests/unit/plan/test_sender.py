"""The sender's plan: golden row 12, and plans worked by hand."""

from __future__ import annotations

from kvxferd.explain.byte_ranges import byte_ranges
from kvxferd.ids import Rank
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.layout.presets import LayerKind, ModelFacts, TokenComponent, deploy
from kvxferd.plan import Plan, decode_plan, encode_plan, sender_plan
from tests.support.attention_engines import engine, plan_between

Engine = dict[Rank, tuple[EngineSpec, RankLayout]]


def sent_by(source: Engine, sink: Engine, producer: int = 0) -> Plan:
    """Return what one producer sends to all ranks of `sink`."""
    return sender_plan(Rank(0, producer), [plan_between(sink, source, tuple(rank)) for rank in sink])


def parts(source: Engine, sink: Engine, producer: int) -> list[tuple[int, int, int, int]]:
    """Return (consumer, source offset, destination offset, length) of what a producer sends of K."""
    sent = byte_ranges(sent_by(source, sink, producer))
    return [
        (ranges.remote_rank.tp_rank, *run)
        for ranges in sent
        if ranges.component == sent[0].component
        for run in ranges.runs
    ]


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
    assert [sent_by(source, sink, producer).sources for producer in range(4)] == [
        (Rank(0, 0),),
        (),
        (Rank(0, 1),),
        (),
    ]


def test_replicated_heads_are_sent_once() -> None:
    """GOLDEN row 12: P8 to D2, K4: D0 from P0 (slot 0) and P2 (slot 1), D1 from P4 and P6."""
    sent = [parts(plain(8, 4), plain(2, 4), producer) for producer in range(0, 8, 2)]
    assert sent == [[(0, 0, 0, 2048)], [(0, 0, 2048, 2048)], [(1, 0, 0, 2048)], [(1, 0, 2048, 2048)]]
    assert [sent_by(plain(8, 4), plain(2, 4), producer).group_reads for producer in (1, 3, 5, 7)] == [()] * 4


def test_a_plan_of_a_sender_is_a_plan() -> None:
    """It goes to a mover as any other does. Inverted once more it is the reader's."""
    source, sink = engine(tp=2), engine(layout="NHD")
    read = plan_between(sink, source)
    sent = [sender_plan(rank, [read]) for rank in source]
    assert [decode_plan(encode_plan(one)) for one in sent] == sent
    assert sender_plan(read.local_rank, sent) == read
