"""The explanation as text: a matrix of ranks, tables of reads and loads, sentences, or the refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from kvxferd.explain.analysis import DecodeRankReads, Explanation, RankRead
from kvxferd.explain.byte_ranges import ByteRanges
from kvxferd.explain.engine_spec_parser import EngineDescription
from kvxferd.explain.formatting import format_numbers, format_ranks, format_unit_ranges, format_units
from kvxferd.explain.read_estimate import ReadEstimate
from kvxferd.ids import Rank
from kvxferd.layout import GroupKind, cache_properties
from kvxferd.plan import format_terms
from kvxferd.telemetry.units import format_time
from kvxferd.tooling.output import Column, console, format_bytes, print_line, print_table, tuple_columns

SHADES = " ░▒▓█"
LOAD_BAR = 24  # characters of the busiest rank's bar
MAX_RANGES = 48


def print_explanation(explanation: Explanation, advice: str = "") -> None:
    """Print everything except byte ranges."""
    for role, engine in (("prefill", explanation.prefill), ("decode", explanation.decode)):
        print_line(f"{role:8}{engine.label}: {_format_engine(engine)}")
    print_line("")
    if explanation.refused:
        _print_refused(explanation)
        return
    _print_matrix(explanation)
    print_line("")
    reads = [(rank.rank, read) for rank in explanation.ranks for read in rank.reads]
    rows = (_read_row(*of_rank) for of_rank in reads)
    print_table("Reads, for a request of 1,000 tokens", _read_columns(explanation), rows)
    print_line("")
    for sentence, count in Counter(f"{read.kind.value}: {read.merges}" for _, read in reads).items():
        print_line(f"{count} read{'s' * (count > 1)}: {sentence}")
    for note in explanation.notes:
        print_line(f"note: {note}")
    if advice:
        print_line(f"advice: {advice}")
    print_line(f"in all {format_bytes(explanation.num_bytes)}")
    print_line("")
    _print_loads(explanation)


def _format_engine(engine: EngineDescription) -> str:
    """Return one line on an engine: sizes, layers, blocks and bytes."""
    spec, layout = engine.spec, engine.ranks[min(engine.ranks)][1]
    attention = [group for group in layout.groups if group.kind is GroupKind.ATTENTION]
    parts = [
        f"pp {spec.pp_size} x tp {spec.tp_size} = {len(engine.ranks)} rank{'s' * (len(engine.ranks) > 1)}",
        f"{spec.num_layers} layers",
        f"{spec.num_kv_heads} KV heads" if spec.num_kv_heads else "no KV heads",
    ]
    if attention:
        sizes = " and ".join(map(str, sorted({group.block_tokens for group in attention})))
        parts.append(f"blocks of {sizes} tokens")
    pages = cache_properties(layout)
    if pages.cross_layers_blocks:
        parts.append("all layers of a block in one page")
    elif pages.is_kv_layout_blocks_first:
        parts.append("K and V of a block in one page")
    if shards := {group.token_shard.count for group in attention} - {1}:
        parts.append(f"tokens shared by {max(shards)} ranks")
    if len(attention) < len(layout.groups):
        parts.append("states")
    return ", ".join(parts)


def _print_refused(explanation: Explanation) -> None:
    print_line("Refused: decode cannot read prefill.", "bold red")
    rows = [(one.field, one.prefill, one.decode, one.message) for one in explanation.refused]
    print_table("Fields", tuple_columns("field", "prefill", "decode", "why"), rows)


def _print_matrix(explanation: Explanation) -> None:
    """Print decode ranks against prefill ranks, shaded by bytes."""
    prefill = sorted(explanation.prefill.ranks)
    given = [{s: _bytes_from(rank, s) for s in prefill} for rank in explanation.ranks]
    most = max((size for row in given for size in row.values()), default=0) or 1
    names = [str(rank.rank) for rank in explanation.ranks]
    margin = max(map(len, names)) + 1
    width = 2 if margin + 2 * len(prefill) + 14 <= console().width else 1
    print_line("Decode ranks (rows) read prefill ranks (columns), bytes per 1,000 tokens:")
    for line in _column_heads(prefill, margin, width):
        print_line(line)
    for name, rank, row in zip(names, explanation.ranks, given, strict=True):
        cells = "".join(_shade(row[source], most) * width for source in prefill)
        print_line(f"{name:{margin}}|{cells}| {format_bytes(rank.num_bytes)}")
    print_line(_legend(most, margin))


def _shade(size: float, most: float) -> str:
    """Return a character for a size, visible for every size above 0."""
    if not size:
        return "·"
    return SHADES[max(1, round(size / most * (len(SHADES) - 1)))]


def _legend(most: int, margin: int) -> str:
    steps = [f"{SHADES[i]} {format_bytes(most * i / (len(SHADES) - 1))}" for i in range(1, len(SHADES))]
    return " " * margin + " · not read   " + "   ".join(steps)


def _column_heads(prefill: list[Rank], margin: int, width: int) -> Iterator[str]:
    """Yield the stage of each column where it begins, then each tp_rank, its digits from top to bottom."""
    stages = ""
    narrow = any(sum(r.pp_rank == rank.pp_rank for r in prefill) * width < 5 for rank in prefill)
    for pp_rank in sorted({rank.pp_rank for rank in prefill}):
        columns = sum(rank.pp_rank == pp_rank for rank in prefill) * width
        stages += (f"{pp_rank}" if narrow else f"pp{pp_rank}")[:columns].ljust(columns)
    yield ("pp" if narrow else "").rjust(margin) + " " + stages
    digits = max(len(str(rank.tp_rank)) for rank in prefill)
    for place in range(digits):
        numbers = (str(rank.tp_rank).rjust(digits)[place] for rank in prefill)
        yield (
            ("tp" if place == digits - 1 else "").rjust(margin)
            + " "
            + "".join(n.ljust(width) for n in numbers)
        )


def _bytes_from(rank: DecodeRankReads, source: Rank) -> int:
    return sum(read.num_bytes for read in rank.reads if read.source == source)


def _read_columns(explanation: Explanation) -> tuple[Column, ...]:
    over = f"over {explanation.link}"
    return tuple_columns(
        "decode", "prefill", "for", "layers", "what", "bytes", "runs", "average run",
        "way", "reads posted", over,
        optional=("runs", "what", "reads posted", "for", "average run"),
    )  # fmt: skip


def _read_row(rank: Rank, read: RankRead) -> tuple[str, ...]:
    return (
        str(rank),
        str(read.source),
        read.kind.value,
        format_numbers(read.layers),
        format_units(read.units),
        format_bytes(read.num_bytes),
        f"{read.num_runs:,}",
        format_bytes(read.mean_run_bytes),
        _way(read.estimate),
        f"{read.estimate.descriptors_posted:,}",
        format_time(read.estimate.predicted_s),
    )


def _way(estimate: ReadEstimate) -> str:
    """Return the way to read, with how much more is read than wanted."""
    extra = estimate.covering_factor
    return f"{estimate.way} {extra:.2g}x" if extra >= 1.05 else estimate.way


def _print_loads(explanation: Explanation) -> None:
    """Print the prefill ranks by load, most first; ranks of equal load share a row."""
    alike: dict[tuple[int, int], list[Rank]] = {}
    loads = explanation.loads()
    for load in loads:
        alike.setdefault((load.num_bytes, load.num_runs), []).append(load.rank)
    most = max(num_bytes for num_bytes, _ in alike)
    mean = explanation.num_bytes / len(loads)
    rows = [
        (format_ranks(ranks), format_bytes(num_bytes), f"{num_bytes / mean:.0%}", f"{num_runs:,}",
         "█" * round(LOAD_BAR * num_bytes / most))
        for (num_bytes, num_runs), ranks in sorted(alike.items(), reverse=True)
    ]  # fmt: skip
    columns = tuple_columns("prefill ranks", "each gives", "of the mean", "runs each", "", optional=("",))
    print_table("Load of prefill ranks, for a request of 1,000 tokens", columns, rows)


def print_terms(rank: DecodeRankReads) -> None:
    """Print what in-engine connectors call the decisions of a decode rank, a line for each prefill stage."""
    print_line("")
    for terms in rank.terms():
        print_line(format_terms(terms))


def print_byte_ranges(role: Literal["decode", "prefill"], rank: Rank, ranges: list[ByteRanges]) -> None:
    """Print what a rank of that side reads (decode) or sends (prefill) of block 0; alike layers together."""
    print_line("")
    other, how = ("prefill", "from") if role == "decode" else ("decode", "to")
    rows: dict[tuple[object, ...], list[ByteRanges]] = {}
    for item in ranges:
        rows.setdefault(item.shape, []).append(item)
    print_table(
        f"Byte ranges of {role} {rank}: its block 0 {how} {other}'s, of the first layer listed",
        tuple_columns(
            other, "layers", "component", "units", f"{role} bytes", f"{other} bytes", "runs", "next block",
            optional=("next block", "units"),
        ),
        map(_range_row, list(rows.values())[:MAX_RANGES]),
        more=max(0, len(rows) - MAX_RANGES),
    )  # fmt: skip
    print_line(f"steps are bytes at {role} / at {other}; --json has every range of every layer")


def _range_row(alike: list[ByteRanges]) -> tuple[str, ...]:
    """Return a row of ranges that differ in their layers alone."""
    item = alike[0]
    local, remote, length = item.runs[0]
    count = len(item.runs)
    return (
        str(item.remote_rank),
        format_numbers(one.layer for one in alike),
        item.component,
        format_unit_ranges((item.units,)),
        f"{item.local_region} [{local}, {local + length})",
        f"{item.remote_region} [{remote}, {remote + length})",
        f"1 of {length}" if count == 1 else f"{count} of {item.num_bytes // count}",
        f"{item.local_block_stride} / {item.remote_block_stride}",
    )
