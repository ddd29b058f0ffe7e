"""The same plans seen from the side that pushes: what one producer rank sends to each consumer rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvxferd.ids import Rank
from kvxferd.layout import CacheTensor, RankLayout
from kvxferd.plan.plan import Plan


class SendPart(NamedTuple):
    """Consecutive units of one component, as both sides hold them in a block."""

    consumer: Rank
    layer: int
    component: str
    source_offset: int  # bytes from the component's first unit, in the producer's block
    destination_offset: int  # the same in the consumer's block
    length: int  # bytes, where units lie behind one another; else units times their stride at the source


def sender_plan(
    producer: Rank, layout: RankLayout, consumers: Mapping[Rank, tuple[RankLayout, Plan]]
) -> list[SendPart]:
    """Return what `producer` sends, by consumer, layer, component and destination.

    `consumers` gives every rank that reads this engine, with the plan by which it does. Together
    with the other producers each unit of each consumer is sent exactly once, as the plans prove.
    A rank that nobody reads, a replica for instance, sends nothing.
    """
    own = {(tensor.layer, tensor.component): tensor for tensor in layout.tensors}
    parts = []
    for consumer, (theirs, plan) in sorted(consumers.items(), key=lambda entry: entry[0]):
        held = {(tensor.layer, tensor.component): tensor for tensor in theirs.tensors}
        for lane in plan.group_reads:
            if lane.rank != producer:
                continue
            for strip in lane.patterns:
                for piece in strip.extents:
                    source = own[piece.layer, piece.component]
                    sink = held[piece.layer, piece.component]
                    parts.append(
                        SendPart(
                            consumer,
                            piece.layer,
                            piece.component,
                            piece.remote_offset - source.offset,
                            piece.local_offset - sink.offset,
                            strip.num_units * _unit_bytes(source),
                        )
                    )
    return sorted(parts)


def _unit_bytes(tensor: CacheTensor) -> int:
    """Return the bytes that one unit takes in a block of the tensor."""
    return tensor.unit_stride if tensor.num_units > 1 else max(tensor.unit_stride, tensor.content_bytes)
