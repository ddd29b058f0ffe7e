"""The bytes and runs that each decode rank would read, computed by the planner and the expander."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import msgspec

from kvxferd.errors import PlanError
from kvxferd.explain.byte_ranges import ByteRanges, byte_ranges
from kvxferd.explain.engine_spec_parser import EngineDescription
from kvxferd.explain.formatting import merged_ranges
from kvxferd.explain.read_estimate import (
    DEFAULT_LINK,
    LINKS,
    Link,
    ReadEstimate,
    estimate_read,
    read_sample,
    tokens_moved,
)
from kvxferd.explain.run_lengths import describe_runs
from kvxferd.ids import Endpoint, EngineId, Rank
from kvxferd.layout import GroupKind, UnitRange
from kvxferd.plan import Plan, TransferTopology, find_differences
from kvxferd.plan.assignment import shared_fraction
from kvxferd.plan.plan import GroupRead
from kvxferd.plan.read_costs import PULL_S

PREFILL, DECODE = EngineId("prefill"), EngineId("decode")
_NO_HOME = Endpoint("")


class Incompatibility(msgspec.Struct, frozen=True):
    """Why nothing can be read: a fact that differs between the engines, or a part that no rank holds."""

    field: str
    prefill: object
    decode: object
    message: str


class RankRead(msgspec.Struct, frozen=True):
    """The read of one decode rank from one prefill rank, of one kind, for a request of 1,000 tokens.

    Attention moves in proportion to the tokens, a sliding window at most its own tokens; a state moves
    once. `num_runs` is for block ids without neighbours: consecutive ones may merge.
    """

    source: Rank
    kind: GroupKind
    layers: tuple[int, ...]  # ascending
    units: dict[str, tuple[UnitRange, ...]]  # by component, of all layers together
    num_bytes: int
    num_runs: int
    merges: str
    estimate: ReadEstimate

    @property
    def mean_run_bytes(self) -> float:
        """The mean bytes of a run, for scattered block ids."""
        return self.num_bytes / self.num_runs


@dataclasses.dataclass(frozen=True)
class DecodeRankReads:
    """All reads of one decode rank."""

    rank: Rank
    layers: tuple[int, int]
    topology: TransferTopology  # in which prefill is registered as `PREFILL`
    plan: Plan
    reads: tuple[RankRead, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of a request of 1,000 tokens."""
        return sum(read.num_bytes for read in self.reads)

    @property
    def num_runs(self) -> int:
        """The runs of a request of 1,000 tokens."""
        return sum(read.num_runs for read in self.reads)

    @property
    def predicted_s(self) -> float:
        """How long the reads take: one mover makes them all."""
        return PULL_S + sum(read.estimate.predicted_s for read in self.reads)

    def terms(self) -> list[dict[str, Any]]:
        """Return what in-engine connectors call the decisions on each prefill stage, by those names."""
        stages = self.topology.find(PREFILL).stages
        return [self.topology.terms(PREFILL, pp_rank) for pp_rank in stages]


class RankLoad(NamedTuple):
    """What one prefill rank gives, for a request of 1,000 tokens."""

    rank: Rank
    readers: tuple[Rank, ...]  # decode ranks, in order; none if it is not read
    num_bytes: int
    num_runs: int


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The reads between two engines by rank, or the reasons why there are none in `refused`."""

    prefill: EngineDescription
    decode: EngineDescription
    ranks: tuple[DecodeRankReads, ...] = ()
    refused: tuple[Incompatibility, ...] = ()
    notes: tuple[str, ...] = ()
    link: str = DEFAULT_LINK  # for which times are predicted

    @property
    def num_bytes(self) -> int:
        """The bytes of a request of 1,000 tokens, into all decode ranks."""
        return sum(rank.num_bytes for rank in self.ranks)

    @property
    def num_runs(self) -> int:
        """The runs of a request of 1,000 tokens, into all decode ranks."""
        return sum(rank.num_runs for rank in self.ranks)

    @property
    def predicted_s(self) -> float:
        """How long the slowest decode rank is predicted to read a request of 1,000 tokens."""
        return max((rank.predicted_s for rank in self.ranks), default=0.0)

    def loads(self) -> list[RankLoad]:
        """Return what each prefill rank gives to all decode ranks: their reads, by source."""
        found = []
        for source in sorted(self.prefill.ranks):
            reads = [(rank.rank, read) for rank in self.ranks for read in rank.reads if read.source == source]
            readers = tuple(dict.fromkeys(reader for reader, _ in reads))
            num_bytes = sum(read.num_bytes for _, read in reads)
            found.append(RankLoad(source, readers, num_bytes, sum(read.num_runs for _, read in reads)))
        return found


def explanation_json(
    explanation: Explanation,
    advice: str,
    reader: DecodeRankReads | None = None,
    sends: list[ByteRanges] | None = None,
) -> dict[str, Any]:
    """Return `ranks`, or `refused`; `terms` and `byte_ranges` of a decode rank; those that are sent."""
    about: dict[str, Any] = {"prefill": explanation.prefill.label, "decode": explanation.decode.label}
    if explanation.refused:
        return about | {"refused": msgspec.to_builtins(explanation.refused)}
    names = ("rank", "layers", "num_bytes", "num_runs", "predicted_s", "reads")
    about |= {name: getattr(explanation, name) for name in ("link", "num_bytes", "notes")}
    about["advice"] = advice
    about["ranks"] = [{name: getattr(rank, name) for name in names} for rank in explanation.ranks]
    if reader is not None:
        about |= {"terms": reader.terms(), "byte_ranges": byte_ranges(reader.plan)}
    if sends is not None:
        about["sent_byte_ranges"] = sends
    found: dict[str, Any] = msgspec.to_builtins(about)
    return found


def explain_pair(
    prefill: EngineDescription, decode: EngineDescription, link: str = DEFAULT_LINK
) -> Explanation:
    """Return the reads of every rank of `decode` from `prefill`, or the reasons why it cannot read.

    Both may be described by one preset, and no rank reads its own engine: so each gets another id.
    `link`: a name of LINKS.
    """
    remote = _with_spec(_of_one_model(prefill, decode), engine_id=PREFILL)
    ranks: list[DecodeRankReads] = []
    refused: dict[Incompatibility, None] = {}  # in order, each once
    reader = _with_spec(_of_one_model(decode, prefill), engine_id=DECODE)
    for rank, (spec, layout) in sorted(reader.ranks.items()):
        topology = TransferTopology(spec, layout)
        try:
            plan = topology.plan_remote_engine(remote, home=_NO_HOME)
        except PlanError as error:
            refused.update(dict.fromkeys(_refusals(remote, reader, rank, error)))
            continue
        ranks.append(
            DecodeRankReads(
                rank, (layout.start_layer, layout.end_layer), topology, plan, tuple(_reads(plan, LINKS[link]))
            )
        )
    if refused:
        return Explanation(prefill, decode, refused=tuple(refused), link=link)
    notes = (*_notes_on_model(prefill, decode), *_notes(ranks))
    return Explanation(prefill, decode, tuple(ranks), notes=notes, link=link)


def _of_one_model(engine: EngineDescription, other: EngineDescription) -> EngineDescription:
    """Return a preset's engine as one of the model of an engine that is described by its ranks.

    A preset has no weights, and its fingerprint is a name. Any other engine is returned as it is.
    """
    if engine.deployment is None or other.deployment is not None:
        return engine
    return _with_spec(engine, fingerprint=other.spec.fingerprint)


def _with_spec(engine: EngineDescription, **fields: str) -> EngineDescription:
    """Return the engine with other fields in the spec of each rank."""
    ranks = {
        rank: (msgspec.structs.replace(spec, **fields), layout)
        for rank, (spec, layout) in engine.ranks.items()
    }
    return dataclasses.replace(engine, ranks=ranks)


def _refusals(
    prefill: EngineDescription, decode: EngineDescription, rank: Rank, error: PlanError
) -> Iterator[Incompatibility]:
    """Yield every difference for one decode rank, else the planner's error."""
    spec, layout = decode.ranks[rank]
    differences = find_differences(spec, layout, prefill.spec, prefill.layouts())
    for difference in differences:
        message = (
            f"{difference.field} of {difference.where} is {difference.remote!r} at prefill and "
            f"{difference.local!r} at decode"
        )
        yield Incompatibility(difference.field, difference.remote, difference.local, message)
    if not differences:
        yield Incompatibility(error.code.value, prefill.label, f"{decode.label} {rank}", error.message)


def _reads(plan: Plan, link: Link) -> Iterator[RankRead]:
    """Yield a plan's reads, source by source, attention before state."""
    by_source: dict[tuple[Rank, GroupKind], list[GroupRead]] = {}
    for group_read in plan.group_reads:
        by_source.setdefault((group_read.rank, group_read.local.kind), []).append(group_read)
    for (source, kind), group_reads in sorted(by_source.items()):
        num_bytes = num_runs = Fraction()
        sentences: dict[str, None] = {}
        samples = []
        for tokens, alike in _by_tokens(group_reads).items():
            size = sum((_bytes_read(group_read, tokens) for group_read in alike), Fraction())
            part = msgspec.structs.replace(plan, group_reads=tuple(alike))
            sample = read_sample(part, size)
            samples.append(sample)
            num_bytes += size
            num_runs += sample.times * len(sample.run_lengths)
            sentences[describe_runs(alike, sample.run_lengths)] = None
        yield RankRead(
            source,
            kind,
            *_layers_and_units(group_reads),
            round(num_bytes),
            max(1, round(num_runs)),
            "; ".join(sentences),
            estimate_read(samples, source, round(num_bytes), max(1, round(num_runs)), link),
        )


def _layers_and_units(
    group_reads: list[GroupRead],
) -> tuple[tuple[int, ...], dict[str, tuple[UnitRange, ...]]]:
    """Return the layers that some group reads have bytes of, and the units of each component."""
    layers: set[int] = set()
    units: dict[str, set[UnitRange]] = {}
    for group_read in group_reads:
        for pattern in group_read.patterns:
            for extent in pattern.extents:
                layers.add(extent.layer)
                held = UnitRange(extent.first_unit, extent.first_unit + pattern.num_units)
                units.setdefault(extent.component, set()).add(held)
    return tuple(sorted(layers)), {name: merged_ranges(units[name]) for name in sorted(units)}


def _by_tokens(group_reads: list[GroupRead]) -> dict[int, list[GroupRead]]:
    """Return the group reads by how many of the request's tokens they move: a sliding window only its own."""
    found: dict[int, list[GroupRead]] = {}
    for group_read in group_reads:
        found.setdefault(tokens_moved(group_read.local.sliding_window), []).append(group_read)
    return found


def _bytes_read(group_read: GroupRead, tokens: int) -> Fraction:
    """Return the bytes of some tokens, exact: they are rounded once, in the sum."""
    of_an_item = sum(
        pattern.local.num_chunks * pattern.local.chunk_bytes * pattern.num_units * len(pattern.extents)
        for pattern in group_read.patterns
    )
    if group_read.local.kind is GroupKind.STATE:
        return Fraction(of_an_item)
    both = shared_fraction(group_read.local.shard, group_read.remote.shard)
    return of_an_item * tokens * both / group_read.granule_tokens


def _notes_on_model(prefill: EngineDescription, decode: EngineDescription) -> Iterator[str]:
    """Yield that one side is taken for the other's model: see `_of_one_model`."""
    for engine, other in ((prefill, decode), (decode, prefill)):
        if engine.deployment is not None and other.deployment is None:
            yield (
                f"{engine.deployment.model.name} has no weights here, and is taken for the model of the "
                f"other engine, {other.spec.fingerprint}"
            )


def _notes(ranks: list[DecodeRankReads]) -> Iterator[str]:
    """Yield notes on what can be read and may still surprise."""
    group_reads = [group_read for rank in ranks for group_read in rank.plan.group_reads]
    pairs = {
        (group_read.local.group, group_read.local.sliding_window, group_read.remote.sliding_window)
        for group_read in group_reads
    }
    for group, mine, theirs in sorted(pairs, key=str):
        if theirs is not None and (mine is None or mine > theirs):
            wanted = "all tokens" if mine is None else f"the last {mine:,} tokens"
            yield (
                f"decode group {group!r} needs {wanted} and prefill keeps the last {theirs:,} only: longer "
                "requests are refused (tokens-not-published) unless prefill still holds them"
            )
    if any(group_read.local.sliding_window is not None for group_read in group_reads):
        windows = sorted(
            {group_read.local.sliding_window for group_read in group_reads if group_read.local.sliding_window}
        )
        listed = ", ".join(f"{window:,}" for window in windows)
        yield f"sliding windows: of those layers only the last {listed} tokens move"
    if any(group_read.local.kind is GroupKind.STATE for group_read in group_reads):
        yield "states move once per request, whatever its length"
