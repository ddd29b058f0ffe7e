"""Chunks of the handover measure: together they are the transfer, and the last says so."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from kvxferd.bench.cases import BLOCKS_PER_RUN, MIB, BlockPattern, Case, block_lists
from kvxferd.bench.measures.handover import num_blocks, pair_of
from kvxferd.bench.rank import BenchRank
from kvxferd.bench.workload import HandoverSize, quick_workload
from kvxferd.layout import unpack_ids


class Rank:
    """Keeps what is reported to it, and when."""

    def __init__(self) -> None:
        self.reports: list[tuple[int | None, list[int]]] = []
        self.times: list[float] = []

    def ready(self, name: str, tokens: int | None, blocks: dict[str, Any]) -> None:
        self.times.append(time.perf_counter())
        (listed,) = blocks.values()
        self.reports.append((tokens, list(unpack_ids(bytes(listed.ids)))))


@pytest.mark.parametrize("num_chunks", [1, 8])
def test_chunks_are_whole_runs_and_together_the_transfer(num_chunks: int) -> None:
    size = HandoverSize(num_chunks, 4 * MIB)
    pair = pair_of(replace(quick_workload(), handover_sizes=(size,)))
    case = Case(pair, BlockPattern.FRAGMENTED, num_blocks(pair, size))
    rank, process = Rank(), object.__new__(BenchRank)  # without a daemon
    process.rank = rank  # type: ignore[assignment]
    began = time.perf_counter()
    last_at = process.extend(case, "t", num_chunks, 0.002)
    (ids,) = block_lists(case, "prefill", 0).values()
    assert [one for _, chunk in rank.reports for one in chunk] == ids.tolist()
    step = case.num_tokens // num_chunks
    assert [ready for ready, _ in rank.reports] == [*range(step, case.num_tokens, step), None]
    assert all(len(chunk) % BLOCKS_PER_RUN == 0 for _, chunk in rank.reports)
    assert rank.times[-1] - began >= 0.002 * num_chunks
    assert began < last_at <= rank.times[-1]
