"""What the workers of one engine settle among themselves before they register."""

from __future__ import annotations

import secrets
from typing import Any

import torch.distributed
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvxferd.ids import Generation


def agree_on_generation(needs_ready: bool) -> tuple[Generation, bool]:
    """Return the engine's generation, which its first rank chose, and whether any rank needs ready.

    Every worker of the engine calls this once; it blocks until all have. A stage of the pipeline
    settles first, then the stages do: the first rank of each hears of the first stage's.
    """
    said = [(secrets.token_hex(8), needs_ready)]
    for group in (get_tp_group(), get_pp_group()):
        said = _all_gather(group, said)
    return Generation(said[0][0]), any(needs for _, needs in said)


def _all_gather(group: Any, said: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    if group.world_size == 1:
        return said
    gathered: list[list[tuple[str, bool]]] = [[] for _ in range(group.world_size)]
    torch.distributed.all_gather_object(gathered, said, group=group.cpu_group)
    return [one for part in gathered for one in part]
