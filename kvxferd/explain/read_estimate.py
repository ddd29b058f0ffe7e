"""How a mover with `mover.read = "auto"` would read from one rank, and how long that is predicted to take.

The request is an example of 1,000 tokens, the link one of `LINKS`. The stretches are those of
`kvxferd.plan.covering`, and the choice is that of `kvxferd.plan.read_costs`: the mover's own. They are
counted over sample lists, and stand for the whole request in proportion to its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from kvxferd.explain.run_lengths import Lengths
from kvxferd.ids import AgentName, Rank, RegionId
from kvxferd.layout import BlocksByGroup, GroupKind, PackedBlocks, pack_ids
from kvxferd.plan import Expander, Plan
from kvxferd.plan.covering import CoveredRank, CoverExpander, CoverRequest, FormCount
from kvxferd.plan.plan import BlockGeometry
from kvxferd.plan.read_costs import (
    START_BYTES_PER_S,
    START_DESCRIPTOR_S,
    Choice,
    CostModel,
    LinkCosts,
    ReadShape,
)

REQUEST_TOKENS = 1000  # tokens of the example request
# Runs are counted over whole blocks of both sides if those have at most MAX_SAMPLE_TOKENS tokens.
MAX_SAMPLE_TOKENS = 8192

DEFAULT_LINK = "cma"
_AGENT = AgentName("prefill")

ReadWay = Literal["direct", "covering"]


class Link(NamedTuple):
    """The constants of a link, and where they come from."""

    descriptor_s: float
    bytes_per_s: float
    source: str


# A descriptor of a network card: 0.7 GB/s with descriptors of 1 KiB, less the time of the bytes themselves.
_RDMA_DESCRIPTOR_S = 1.4e-6
_RDMA_SOURCE = "0.7 GB/s with descriptors of 1 KiB, reported in LMCache#4161; the bandwidth is the card's"

LINKS: dict[str, Link] = {
    "cma": Link(
        START_DESCRIPTOR_S,
        START_BYTES_PER_S,
        "measured on two cores, NIXL 1.5.1: 64 MiB as 262,144 descriptors 621 ms, as one 7 ms",
    ),
    "tcp": Link(
        4.5e-6,
        1.1e9,
        "measured on two cores, NIXL 1.5.1: 64 MiB as 262,144 descriptors 1.2 to 1.9 s; long ones 1.1 GB/s",
    ),
    "100g": Link(_RDMA_DESCRIPTOR_S, 100e9 / 8, _RDMA_SOURCE),
    "400g": Link(_RDMA_DESCRIPTOR_S, 400e9 / 8, _RDMA_SOURCE),
}


class ReadSample(NamedTuple):
    """A part of a request: what some group reads of one rank move for some tokens."""

    plan: Plan  # of these group reads alone
    local: BlocksByGroup
    remote: BlocksByGroup
    run_lengths: Lengths
    times: Fraction  # how many such samples the request has


def read_sample(plan: Plan, num_bytes: Fraction) -> ReadSample:
    """Return a sample of a request that moves so many bytes by the plan; its ids have no neighbours.

    Such ids merge nothing, so tokens after which the blocks of all sides begin together are as good as a
    whole request; the tokens of the largest block where these would be too many. The ids need not exist.
    """
    sides = [side for read in plan.group_reads for side in (read.local, read.remote)]
    spans = [side.id_tokens for side in sides if side.id_tokens]
    step = math.lcm(*spans)
    tokens = step if step <= MAX_SAMPLE_TOKENS else max(spans)
    local = {read.local.group: _sample_block_ids(read.local, tokens) for read in plan.group_reads}
    remote = {read.remote.group: _sample_block_ids(read.remote, tokens) for read in plan.group_reads}
    parts = Expander(plan).parts(local, remote, tokens, *_bases_at_zero(plan))
    lengths = np.concatenate([runs.length for part in parts for runs in part.values()])
    return ReadSample(plan, local, remote, lengths, num_bytes / int(lengths.sum()))


class ReadEstimate(msgspec.Struct, frozen=True):
    """The way to read, for a request of 1,000 tokens with block ids without neighbours."""

    way: ReadWay
    covering_factor: float  # bytes that are read, by bytes that are wanted
    descriptors_direct: int  # one for each run
    descriptors_posted: int  # by the chosen way
    predicted_s: float


def estimate_read(
    samples: Sequence[ReadSample], source: Rank, num_bytes: int, num_runs: int, link: Link
) -> ReadEstimate:
    """Return the way that is predicted to be faster; `num_bytes`, `num_runs` are those of the request."""
    requests = [CoverExpander(one.plan).prepare(one.local, one.remote) for one in samples]
    forms = [
        FormCount(
            form.rank,
            form.form,
            *(max(1, round(num * one.times)) for num in (form.num_stretches, form.num_descriptors)),
        )
        for one, request in zip(samples, requests, strict=True)
        if request is not None
        for form in request.forms()
    ]
    model = CostModel()
    costs = model.link(_AGENT)
    costs.descriptor_s, costs.bytes_per_s = link.descriptor_s, link.bytes_per_s
    choice = model.choose(forms, {source: _AGENT})
    if not choice.covered:
        predicted_s = costs.predict_s(ReadShape(num_runs, num_bytes))
        return ReadEstimate("direct", 1.0, num_runs, num_runs, predicted_s)
    posted = extra_bytes = Fraction()
    for one, request in zip(samples, requests, strict=True):
        num_posted, num_extra = _posted(one, request, choice)
        posted += num_posted * one.times
        extra_bytes += num_extra * one.times
    predicted_s = choice.chosen_s + _rest_s(forms, num_bytes, num_runs, costs)
    factor = float(1 + extra_bytes / num_bytes)
    return ReadEstimate("covering", factor, num_runs, max(1, round(posted)), predicted_s)


def _posted(sample: ReadSample, request: CoverRequest | None, choice: Choice) -> tuple[int, int]:
    """Return how many descriptors a sample takes, and how many bytes are read beside those wanted."""
    if request is None:
        return len(sample.run_lengths), 0
    parts = request.parts(*_bases_at_zero(sample.plan), choice.pays)
    ranks: list[CoveredRank] = [rank for part in parts for rank in part.values()]
    stretches = [one for rank in ranks for one in rank.stretches]
    num_runs = sum(len(runs.length) for rank in ranks for runs in rank.runs)
    return (
        num_runs + sum(one.num_descriptors for one in stretches),
        sum(one.covered_bytes - one.num_bytes for one in stretches),
    )


def _rest_s(forms: Sequence[FormCount], num_bytes: int, num_runs: int, costs: LinkCosts) -> float:
    """Return how long the runs take that have no form: they are always read directly."""
    bytes_of_forms = sum(one.num_stretches * one.form.num_bytes for one in forms)
    runs_of_forms = sum(one.num_stretches * one.form.num_copies for one in forms)
    rest = ReadShape(max(0, num_runs - runs_of_forms), max(0, num_bytes - bytes_of_forms))
    # Without a form for some runs, at least these remain; a few are the rounding of counts.
    return costs.predict_s(rest) if rest.num_bytes > num_bytes // 100 else 0.0


def tokens_moved(window: int | None) -> int:
    """Return how many of the request's tokens a group moves: of a sliding window only its own."""
    return REQUEST_TOKENS if window is None else min(REQUEST_TOKENS, window)


def _bases_at_zero(plan: Plan) -> tuple[dict[RegionId, int], dict[Rank, dict[RegionId, int]]]:
    """Return addresses for a plan's regions, of its own rank and of each that it reads: nothing is moved."""
    patterns = [pattern for read in plan.group_reads for pattern in read.patterns]
    theirs = dict.fromkeys((pattern.remote.region for pattern in patterns), 0)
    mine = dict.fromkeys((pattern.local.region for pattern in patterns), 0)
    return mine, {read.rank: theirs for read in plan.group_reads}


def _sample_block_ids(side: BlockGeometry, tokens: int) -> PackedBlocks:
    if side.kind is GroupKind.STATE:
        return PackedBlocks(pack_ids([0]), state_at=tokens)
    return PackedBlocks(pack_ids([2 * i for i in range(-(-tokens // side.id_tokens))]))
