"""Random pairs of deployments by covering reads: every byte, and every stretch inside one block."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kvxferd.errors import PlanError
from kvxferd.ids import Rank, RegionId
from kvxferd.layout import GroupKind, RankLayout
from kvxferd.mover.chunks.covering import CoverSlicer, scatter_pieces
from kvxferd.plan import Expander, Runs, check_request, make_plan
from kvxferd.plan.covering import CoveredRank, CoverExpander
from kvxferd.plan.stretches import StretchForm
from kvxferd.plan.table_cache import TableCache
from tests.support import brute_force
from tests.support.brute_force import read
from tests.support.layout_strategies import Pull, pulls

pytestmark = pytest.mark.slow

BUDGET = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def bytes_of(runs: list[Runs]) -> list[tuple[int, int]]:
    """Return (local, remote) of every byte, in order of the local one."""
    found = []
    for one in runs:
        for to, at, size in zip(*(column.tolist() for column in one), strict=True):
            found += [(to + i, at + i) for i in range(size)]
    return sorted(found)


def direct_runs(part: CoveredRank, local_bases: Mapping[RegionId, int]) -> list[Runs]:
    return [*part.runs, *(s.runs(local_bases[s.local_region]) for s in part.stretches)]


def blocks_of_bytes(layout: RankLayout) -> dict[tuple[RegionId, int], set[tuple[str, int]]]:
    """Return which (group, kernel block) each byte of a rank belongs to."""
    groups = {group.name: group for group in layout.groups}
    found = defaultdict(set)
    for tensor in layout.tensors:
        group = groups[tensor.group]
        per_id = 1 if group.kind is GroupKind.STATE else group.physical_blocks_per_logical
        items = 1 if group.kind is GroupKind.STATE else group.block_tokens // per_id // tensor.granule_tokens
        units = sum(unit.stop - unit.start for unit in tensor.units)
        inner = np.arange(tensor.chunk_bytes)
        for block in range(group.num_blocks * per_id):
            for item in range(items):
                for unit in range(units):
                    for chunk in range(tensor.num_chunks):
                        at = tensor.offset + block * tensor.block_stride + item * tensor.token_stride
                        at += unit * tensor.unit_stride + chunk * tensor.chunk_stride
                        for byte in (inner + at).tolist():
                            found[tensor.region, byte].add((tensor.group, block))
    return found


def stretches_of(part: CoveredRank) -> Iterator[tuple[int, int, StretchForm]]:
    for one in part.stretches:
        for at in one.remote.tolist():
            yield at, one.form.size_bytes, one.form


@BUDGET
@given(pulls(), st.data())
def test_covering_reads_write_what_direct_reads_write(pull: Pull, data: st.DataObject) -> None:
    sink, source, mine, theirs = pull.sink, pull.source, pull.mine, pull.theirs
    rank, num_tokens = pull.rank, pull.num_tokens
    layout = sink.ranks[rank]
    try:
        plan = make_plan(sink.spec_of(rank), layout, source.spec, source.ranks)
        check_request(plan, mine, theirs, num_tokens)
    except PlanError:
        return
    local_at = brute_force.bases(layout, 0)
    remote_at = {r: brute_force.bases(source.ranks[r], i + 1) for i, r in enumerate(sorted(source.ranks))}
    wanted = Expander(plan).expand(mine, theirs, num_tokens, local_at, remote_at)
    max_stretches = data.draw(st.sampled_from([1, 7, 1 << 18]))
    tables = TableCache(data.draw(st.sampled_from([1, 4000, 8 << 20])))
    # Some forms only: the others are read directly.
    every = data.draw(st.integers(1, 3))
    found: dict[Rank, CoveredRank] = {}
    request = CoverExpander(plan, tables).prepare(mine, theirs)
    assert request is not None, "small blocks have few signatures"
    assert {one.rank for one in request.forms()} <= set(wanted)
    for part in request.parts(
        local_at, remote_at, lambda _, form: form.num_copies % every == 0, max_stretches
    ):
        for source_rank, one in part.items():
            both = found.setdefault(source_rank, CoveredRank())
            both.stretches += one.stretches
            both.runs += one.runs
    assert tables.num_bytes <= 8 << 20
    for source_rank in set(wanted) | set(found):
        runs = [wanted[source_rank]] if source_rank in wanted else []
        assert bytes_of(direct_runs(found.get(source_rank, CoveredRank()), local_at)) == bytes_of(runs)
    check_stretches(found, source.ranks, remote_at, wanted)
    check_scatter(data, found, layout, local_at, source.ranks, remote_at, wanted)


def check_stretches(
    found: Mapping[Rank, CoveredRank],
    ranks: Mapping[Rank, RankLayout],
    remote_at: Mapping[Rank, Mapping[RegionId, int]],
    wanted: Mapping[Rank, Runs],
) -> None:
    """A stretch lies in one region and in one block, and begins and ends with a byte that was asked for."""
    for rank, part in found.items():
        owners = blocks_of_bytes(ranks[rank])
        requested = {at for _, at in bytes_of([wanted[rank]])} if rank in wanted else set()
        for at, size, form in stretches_of(part):
            assert form.num_bytes <= size * form.num_blocks
            regions = [
                (r.region, at - remote_at[rank][r.region])
                for r in ranks[rank].regions
                if 0 <= at - remote_at[rank][r.region] < r.size_bytes
            ]
            ((region, begin),) = regions
            (length,) = [r.size_bytes for r in ranks[rank].regions if r.region == region]
            assert begin + size <= length
            assert at in requested
            assert at + size - 1 in requested
            # Tensors of different groups may lie in one page; blocks of one group must not meet.
            for group in {name for name, _ in owners[region, begin]}:
                blocks = {
                    b for i in range(size) for g, b in owners.get((region, begin + i), ()) if g == group
                }
                assert len(blocks) == 1


def check_scatter(
    data: st.DataObject,
    found: Mapping[Rank, CoveredRank],
    layout: RankLayout,
    local_at: Mapping[RegionId, int],
    ranks: Mapping[Rank, RankLayout],
    remote_at: Mapping[Rank, Mapping[RegionId, int]],
    wanted: Mapping[Rank, Runs],
) -> None:
    """Through chunks of any size every byte lands in its place, once, and no other byte changes."""
    chunk_bytes = data.draw(st.sampled_from([512, 4096, 1 << 20]))
    budget = data.draw(st.sampled_from([1, 100_000, 1 << 30]))
    sink = brute_force.memory(layout, 0)
    expected = {region: array.copy() for region, array in sink.items()}
    chunk = np.random.default_rng(1).integers(0, 256, chunk_bytes, dtype=np.uint8)
    for i, rank in enumerate(sorted(ranks)):
        source = brute_force.memory(ranks[rank], i + 1)
        if rank in wanted:
            read(wanted[rank], expected, local_at, source, remote_at[rank])
        part = found.get(rank)
        if part is None:
            continue
        for runs in part.runs:
            read(runs, sink, local_at, source, remote_at[rank])
        # A stretch is a small part of a real chunk.
        fitting = [s for s in part.stretches if s.form.size_bytes <= chunk_bytes]
        for one in part.stretches:
            if one.form.size_bytes > chunk_bytes:
                read(one.runs(local_at[one.local_region]), sink, local_at, source, remote_at[rank])
        slicer = CoverSlicer(fitting, list(remote_at[rank].values()))
        num_bytes = 0
        while not slicer.is_empty:
            fill = slicer.next_fill(budget, chunk_bytes)
            assert (fill.offset + fill.length).max() <= chunk_bytes
            read(fill.runs(0), {RegionId("chunk"): chunk}, {RegionId("chunk"): 0}, source, remote_at[rank])
            num_bytes += fill.num_bytes
            for piece in scatter_pieces(fill, chunk, sink):
                piece()
            event("a chunk was filled")
        assert num_bytes == slicer.num_bytes
    for region in sink:
        assert (sink[region] == expected[region]).all()
