"""Plans for a producer that pushes: what one producer rank sends to each consumer rank."""

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
    destination_offset: int  # bytes from the component's first unit, in the consumer's block
    length: int  # bytes, where units lie behind one another; else units times their stride at the source


def sender_plan(
    producer: Rank, layout: RankLayout, consumers: Mapping[Rank, tuple[RankLayout, Plan]]
) -> list[SendPart]:
    """Return what `producer` sends, ordered by consumer, layer, component and destination.

    `consumers` has every rank that reads this engine, with its layout and plan. All producers
    together send each unit of each consumer exactly once, as the plans prove. A rank that no plan
    reads, for instance a replica, sends nothing.
    """
    own = {(tensor.layer, tensor.component): tensor for tensor in layout.tensors}
    parts = []
    for consumer, (theirs, plan) in sorted(consumers.items(), key=lambda entry: entry[0]):
        held = {(tensor.layer, tensor.component): tensor for tensor in theirs.tensors}
        for read in plan.group_reads:
            if read.rank != producer:
                continue
            for pattern in read.patterns:
                for extent in pattern.extents:
                    source = own[extent.layer, extent.component]
                    sink = held[extent.layer, extent.component]
                    parts.append(
                        SendPart(
                            consumer,
                            extent.layer,
                            extent.component,
                            extent.remote_offset - source.offset,
                            extent.local_offset - sink.offset,
                            pattern.num_units * _unit_bytes(source),
                        )
                    )
    return sorted(parts)


def _unit_bytes(tensor: CacheTensor) -> int:
    """Return the bytes that one unit takes in a block of the tensor."""
    return tensor.unit_stride if tensor.num_units > 1 else max(tensor.unit_stride, tensor.content_bytes)
