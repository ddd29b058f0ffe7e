"""A transfer that is published before it is written, and extended by each rank in its own time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxferd.client.gpu_events import unfinished
from kvxferd.errors import KvxferdError
from kvxferd.ids import GroupName
from kvxferd.layout import PackedBlocks, pack_ids
from tests.property.simulation.memory import BLOCK_TOKENS

if TYPE_CHECKING:
    from tests.property.simulation.engine import Engine, Transfer
    from tests.property.simulation.process import Process

DELAYS_S = (0.001, 0.01, 0.1, 0.3)


class Growth:
    """How far a transfer is at its publish, and after each step. Without steps it is whole at once."""

    def __init__(self, transfer: Transfer, steps: list[int], last_step_s: float | None = None) -> None:
        """`last_step_s`: how long each rank takes for the last step; None: as for any other."""
        self._transfer = transfer
        self._last_step_s = last_step_s
        first, *rest = sorted(steps) or [transfer.num_tokens]
        self.begins_with = first
        self.steps = [*rest, transfer.num_tokens] if steps else []
        self.ready_tokens = first if steps else -1
        # A scheduler knows all blocks; a rank adds them as it writes.
        self._adds_blocks = bool(steps) and transfer.publisher.spec is not None
        self.blocks_at_first = self._blocks(0, first) if self._adds_blocks else transfer.ids

    def __str__(self) -> str:
        return f", {self.ready_tokens} tokens of it, then {self.steps}" if self.steps else ""

    def _blocks(self, begin: int, end: int) -> list[int]:
        return self._transfer.ids[-(-begin // BLOCK_TOKENS) : -(-end // BLOCK_TOKENS)]

    def start(self, engine: Engine) -> None:
        """Have each rank that reports write and report, step by step."""
        says_ready, publisher = engine.shape.says_ready, self._transfer.publisher
        for process in self._transfer.ranks if says_ready else [publisher]:
            # A publisher has written the first tokens; its publish says so.
            steps = self.steps if process is publisher else [self.begins_with, *self.steps]
            before = self.begins_with if process is publisher else 0
            self._schedule(engine, process, before, steps)

    def _schedule(self, engine: Engine, process: Process, before: int, steps: list[int]) -> None:
        if steps:
            delay_s = engine.rng.choice(DELAYS_S)
            if len(steps) == 1 and self._last_step_s is not None:
                delay_s = self._last_step_s
            process.after(delay_s, self._extend, engine, process, before, steps)

    def _extend(self, engine: Engine, process: Process, before: int, steps: list[int]) -> None:
        transfer, (tokens, *rest) = self._transfer, steps
        work = engine.write_more(process, transfer, tokens)
        if work is None:
            return
        now, is_last = process.clock.now(), not rest
        blocks = None
        if self._adds_blocks and process is transfer.publisher and (ids := self._blocks(before, tokens)):
            blocks = {GroupName("full"): PackedBlocks(pack_ids(ids))}
        try:
            ready = -1 if is_last else tokens
            process.session.ready(transfer.transfer_id, now, ready, unfinished(work), blocks)
        except KvxferdError:
            return  # it is over, or the rank is to sleep
        process.act(f"extends {transfer.transfer_id} to {tokens} tokens")
        self._schedule(engine, process, tokens, rest)
