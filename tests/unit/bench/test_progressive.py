"""Chunks of the progressive measure: together they are the transfer, and the last says so."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvxferd.bench import protocol
from kvxferd.bench.cases import BLOCKS_PER_RUN, BlockPattern, Case, block_lists
from kvxferd.bench.measures.progressive import deployment_of, memory_bytes, num_bytes
from kvxferd.bench.rank_process import BenchRank
from kvxferd.bench.workload import MIB, ProgressiveSize
from kvxferd.layout import unpack_ids


class Rank:
    """Keeps what is reported to it, and when."""

    def __init__(self) -> None:
        self.reports: list[tuple[int | None, list[int]]] = []
        self.times: list[float] = []

    def extend(self, name: str, ready_tokens: int | None, blocks: dict[str, Any]) -> None:
        self.times.append(time.perf_counter())
        (listed,) = blocks.values()
        self.reports.append((ready_tokens, list(unpack_ids(bytes(listed.ids)))))


def case_of(size: ProgressiveSize) -> Case:
    deployment = deployment_of("cma", size)
    return Case(deployment=deployment, lists=BlockPattern.FRAGMENTED, blocks=deployment.pool_blocks)


@pytest.mark.parametrize("num_chunks", [1, 8])
def test_chunks_are_whole_runs_and_together_the_transfer(num_chunks: int) -> None:
    case = case_of(ProgressiveSize(num_chunks, 4 * MIB, 1))
    rank, process = Rank(), object.__new__(BenchRank)  # without a daemon
    process._rank = rank  # type: ignore[assignment]
    extended = process.extend(protocol.ExtendCommand(case=case, name="t", num_chunks=num_chunks, gap_s=0.002))
    (ids,) = block_lists(case, "source", 0).values()
    assert [one for _, chunk in rank.reports for one in chunk] == ids.tolist()
    step = case.num_tokens // num_chunks
    assert [ready for ready, _ in rank.reports] == [*range(step, case.num_tokens, step), None]
    assert all(len(chunk) % BLOCKS_PER_RUN == 0 for _, chunk in rank.reports)
    assert rank.times[-1] - rank.times[0] >= 0.0019 * (num_chunks - 1)
    assert 0 <= rank.times[-1] - extended.last_at < 1
    assert extended.cpu_s > 0


@pytest.mark.parametrize("size", [ProgressiveSize(8, 64 * MIB, 7), ProgressiveSize(3, 2 * MIB, 1)])
def test_a_transfer_has_about_its_size(size: ProgressiveSize) -> None:
    case, whole = case_of(size), size.num_chunks * size.chunk_bytes
    assert abs(num_bytes(case) - whole) <= whole // 4
    assert memory_bytes(size) >= num_bytes(case)
