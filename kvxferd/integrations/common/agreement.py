"""The agreement of one engine's ranks before they register."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def gather_from_ranks(groups: Iterable[Any], own: T) -> list[T]:
    """Return every rank's value, the first rank's first. Every rank calls this; it blocks until all have.

    `groups`: torch's coordinators, of which each has a `world_size` and a `cpu_group`: the tensor-parallel
    one, then that of the pipeline stages.
    """
    import torch.distributed

    gathered = [own]
    for group in groups:
        if group.world_size > 1:
            parts: list[list[T]] = [[] for _ in range(group.world_size)]
            torch.distributed.all_gather_object(parts, gathered, group=group.cpu_group)
            gathered = [one for part in parts for one in part]
    return gathered
