"""The sender's plan: what one producer rank gives to each consumer rank. It is the readers' plans, inverted.

Who serves a unit is decided once, by the consumers' plans, so replicas do not all send.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvxferd.ids import Rank
from kvxferd.plan.plan import Extent, GroupRead, Plan
from kvxferd.plan.planner import plan_of, sorted_patterns


def sender_plan(producer: Rank, plans: Iterable[Plan]) -> Plan:
    """Return what the rank `producer` sends to the ranks of one engine, whose plans are `plans`.

    In the result the producer is the local side, and the rank of each group read is a consumer: an `Expander`
    of it gives a request's runs with the source's addresses as local ones. The consumers' plans check the
    request. All producers together send each byte of each consumer exactly once, as those plans prove. A rank
    that no plan reads, for instance a replica, sends nothing: its plan is empty.
    """
    return plan_of(
        producer,
        [
            _inverted(plan.local_rank, read)
            for plan in plans
            for read in plan.group_reads
            if read.rank == producer
        ],
    )


def _inverted(consumer: Rank, read: GroupRead) -> GroupRead:
    """Return a group read with its sides exchanged, in the order of the producer's memory."""
    patterns = {
        (pattern.remote, pattern.local, pattern.num_units): [
            Extent(
                extent.layer, extent.component, extent.first_unit, extent.remote_offset, extent.local_offset
            )
            for extent in pattern.extents
        ]
        for pattern in read.patterns
    }
    return GroupRead(consumer, read.remote, read.local, read.granule_tokens, sorted_patterns(patterns))
