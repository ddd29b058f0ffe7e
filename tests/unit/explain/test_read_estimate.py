"""How explain predicts that a rank is read: against arithmetic of its own, and against the mover's slices."""

from __future__ import annotations

import msgspec
import pytest

from kvxferd.cli.explain import LINK_NAMES
from kvxferd.explain.analysis import explain_pair
from kvxferd.explain.read_estimate import DEFAULT_LINK, LINKS, ReadEstimate
from kvxferd.ids import Rank, RegionId
from kvxferd.layout import GroupKind, PackedBlocks, pack_ids
from kvxferd.mover.chunks.covering import CoverSlicer
from kvxferd.plan import Plan
from kvxferd.plan.covering import CoverExpander
from kvxferd.plan.read_costs import CHUNK_TAIL_BYTES, START_COPY_BYTES_PER_S
from tests.support.explained_pairs import described, explained

LAYERS, HEAD_BYTES = 32, 256  # of llama-3-8b, K and V each: 8 heads


def only_estimate(prefill: str, decode: str, link: str = DEFAULT_LINK) -> ReadEstimate:
    """Return the first read's estimate."""
    found = explain_pair(described(prefill), described(decode), link)
    return found.ranks[0].reads[0].estimate


def test_the_links_of_the_command_are_those_of_the_table() -> None:
    assert tuple(LINKS) == LINK_NAMES
    assert LINK_NAMES[0] == DEFAULT_LINK
    assert all(link.source for link in LINKS.values())


def test_another_order_is_read_in_whole_blocks() -> None:
    """128 runs of a block are one stretch, and nothing is read that is not wanted."""
    found = only_estimate("llama-3-8b", "llama-3-8b,layout=NHD")
    assert (found.way, found.covering_factor) == ("covering", 1.0)
    assert found.descriptors_direct == LAYERS * 2 * 1000 * 8
    assert found.descriptors_posted == LAYERS * 2 * 1000 // 16
    num_bytes = LAYERS * 2 * 8 * HEAD_BYTES * 1000
    copies = num_bytes / START_COPY_BYTES_PER_S  # longer than the reads, beside which they run
    assert found.predicted_s == pytest.approx(copies + CHUNK_TAIL_BYTES / START_COPY_BYTES_PER_S)


def test_what_lies_between_wanted_bytes_is_counted() -> None:
    """Two of eight heads of each token: the stretch ends with the last token's two heads."""
    found = only_estimate("llama-3-8b,layout=NHD", "llama-3-8b,tp=4,layout=NHD")
    assert found.way == "covering"
    assert found.covering_factor == pytest.approx((15 * 8 + 2) / (16 * 2))
    assert found.descriptors_posted == LAYERS * 2 * 1000 // 16


def test_what_is_too_varied_to_cover_is_direct_with_all_its_runs() -> None:
    """Chunks of 16 bytes of all heads, token by token: more runs a block than tables are made of."""
    found = only_estimate("llama-3-8b,layout=vectorised", "llama-3-8b")
    assert found.way == "direct"
    assert found.descriptors_posted == found.descriptors_direct > 1_000_000


@pytest.mark.parametrize("link", LINK_NAMES)
def test_the_link_decides_what_reading_more_costs(link: str) -> None:
    """Four times the bytes: worth it where descriptors are dear, whatever the link is called."""
    found = only_estimate("llama-3-8b,layout=NHD", "llama-3-8b,tp=4,layout=NHD", link)
    of = LINKS[link]
    wanted = LAYERS * 2 * 2 * HEAD_BYTES * 1000
    direct_s = found.descriptors_direct * of.descriptor_s + wanted / of.bytes_per_s
    stretches = LAYERS * 2 * 62.5
    covering_s = stretches * of.descriptor_s + stretches * 122 * HEAD_BYTES / of.bytes_per_s
    tail_s = CHUNK_TAIL_BYTES / START_COPY_BYTES_PER_S
    by_covering = max(covering_s, wanted / START_COPY_BYTES_PER_S) + tail_s
    want = "covering" if direct_s >= 1.3 * by_covering else "direct"
    assert found.way == want
    assert found.predicted_s == pytest.approx(by_covering if want == "covering" else direct_s)


PAIRS = [
    ("llama-3-8b,tp=4", "llama-3-8b,tp=2,layout=NHD,block_tokens=32"),
    ("llama-3-8b,block_tokens=12", "llama-3-8b,layout=NHD"),
    ("nemotron-h-8b,tp=2", "nemotron-h-8b,layout=NHD"),
]


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_posted_descriptors_are_those_of_the_movers_slices(prefill: str, decode: str) -> None:
    """Of a request whose length is a multiple of all blocks, expanded and sliced as a mover does."""
    found = explained(prefill, decode)
    for rank in found.ranks:
        for read in rank.reads:
            if read.estimate.way == "direct" or read.kind is GroupKind.STATE:
                continue
            spans = {one.local.id_tokens for one in rank.plan.group_reads if one.local.id_tokens}
            spans |= {one.remote.id_tokens for one in rank.plan.group_reads if one.remote.id_tokens}
            tokens = 48 * max(spans)
            posted = _slice(rank.plan, read.source, tokens)
            assert read.estimate.descriptors_posted == pytest.approx(posted * 1000 / tokens, rel=0.03, abs=2)


def _slice(plan: Plan, source: Rank, tokens: int) -> int:
    """Return how many descriptors a mover posts for covering reads of attention from one rank."""
    reads = tuple(
        one for one in plan.group_reads if one.rank == source and one.local.kind is GroupKind.ATTENTION
    )
    part = msgspec.structs.replace(plan, group_reads=reads)
    local, remote = {}, {}
    for one in reads:
        for lists, side in ((local, one.local), (remote, one.remote)):
            lists[side.group] = PackedBlocks(pack_ids([3 * i for i in range(-(-tokens // side.id_tokens))]))
    request = CoverExpander(part).prepare(local, remote)
    assert request is not None
    mine: dict[RegionId, int] = {p.local.region: 0 for one in reads for p in one.patterns}
    theirs: dict[RegionId, int] = {p.remote.region: 0 for one in reads for p in one.patterns}
    covered = [rank for step in request.parts(mine, {source: theirs}) for rank in step.values()]
    return sum(CoverSlicer(rank.stretches, []).num_descriptors for rank in covered)
