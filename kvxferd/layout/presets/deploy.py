"""From a model's name and a deployment's choices to every rank of an engine."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Choices:
    """What a deployment chooses, alike on every rank of it; the model decides the rest."""

    tp: int = 1
    pp: int = 1
    block_tokens: int = 16  # of a kernel block
    layout: str = "HND"
    num_blocks: int = 1024  # ids of a group
