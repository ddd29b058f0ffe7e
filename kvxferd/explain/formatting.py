"""Ranks, layers and units as text, for the text and the SVG report."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from kvxferd.explain.analysis import Explanation
from kvxferd.explain.engine_spec_parser import EngineDescription
from kvxferd.ids import Rank
from kvxferd.layout import GroupKind, UnitRange, cache_properties
from kvxferd.tooling.output import format_bytes


def format_numbers(numbers: Iterable[int]) -> str:
    """Return whole numbers as ranges, both ends included: ``0-3, 7``; many ranges end in their count."""
    return format_unit_ranges(UnitRange(number, number + 1) for number in numbers)


def format_unit_ranges(ranges: Iterable[UnitRange]) -> str:
    """Return units as `format_numbers` does. A hostile rank may hold a billion: they are not counted out."""
    joined: list[list[int]] = []
    for start, stop in sorted((held.start, held.stop) for held in ranges if held.start < held.stop):
        if joined and start == joined[-1][1]:
            joined[-1][1] = stop
        else:
            joined.append([start, stop])
    texts = [str(a) if a + 1 == b else f"{a}-{b - 1}" for a, b in joined]
    if len(texts) <= 4:
        return ", ".join(texts)
    steps = {after[0] - before[0] for before, after in itertools.pairwise(joined)}
    if len(steps) == 1 and all(a + 1 == b for a, b in joined):
        return f"{texts[0]}, {texts[1]}, ..., {texts[-1]}"
    return f"{sum(b - a for a, b in joined)} of {joined[0][0]}-{joined[-1][1] - 1}"


def format_layers(layers: Iterable[int]) -> str:
    """Return layers in short form: ``L0-39``, ``24 of L0-50``."""
    text = format_numbers(layers)
    count, of, rest = text.partition(" of ")
    return f"{count}{of}L{rest}" if of else f"L{text}"


def format_ranks(ranks: Sequence[Rank]) -> str:
    """Return ranks stage by stage: ``pp0.tp0-3, pp1.tp0-3``, ``7 of pp0.tp0-14``."""
    stages: dict[int, list[int]] = {}
    for rank in ranks:
        stages.setdefault(rank.pp_rank, []).append(rank.tp_rank)
    texts = {pp: format_numbers(tps).replace(", ..., ", "..") for pp, tps in stages.items()}
    return ", ".join(_stage_ranks(pp, text) for pp, text in texts.items()) or "-"


def _stage_ranks(pp_rank: int, text: str) -> str:
    count, of, rest = text.partition(" of ")
    return f"{count} of pp{pp_rank}.tp{rest}" if of else f"pp{pp_rank}.tp{text.replace(', ', '+')}"


def format_units(units: Mapping[str, tuple[UnitRange, ...]]) -> str:
    """Return units, with components of equal units together: ``k v heads 0-3``."""
    together: dict[str, list[str]] = {}
    for name, held in units.items():
        together.setdefault(format_unit_ranges(held), []).append(name)
    return "; ".join(f"{_component_label(names)} {held}".strip() for held, names in together.items())


def format_heads(units: Mapping[str, tuple[UnitRange, ...]]) -> str:
    """Return the heads (h) or state heads (s) that are read; "latent" if there is nothing to divide."""
    for name, mark in (("k", "h"), ("v", "h"), ("kv", "h"), ("ssm", "s")):
        if name in units:
            return mark + format_unit_ranges(units[name])
    return "latent" if "latent" in units else next(iter(units), "")


def _component_label(names: list[str]) -> str:
    heads = set(names) <= {"k", "v", "kv"}
    if heads:
        return f"{' '.join(names)} heads"
    return " ".join(names)


def format_engine(engine: EngineDescription) -> str:
    """Return one line on an engine: sizes, layers, blocks and bytes."""
    spec = engine.spec
    groups = engine.ranks[min(engine.ranks)][1].groups
    attention = [group for group in groups if group.kind is GroupKind.ATTENTION]
    shards = {group.token_shard.count for group in attention} - {1}
    parts = [
        f"pp {spec.pp_size} x tp {spec.tp_size} = {len(engine.ranks)} rank{'s' * (len(engine.ranks) > 1)}",
        f"{spec.num_layers} layers",
        f"{spec.num_kv_heads} KV heads" if spec.num_kv_heads else "no KV heads",
    ]
    if attention:
        parts.append(
            "blocks of "
            + " and ".join(str(n) for n in sorted({g.block_tokens for g in attention}))
            + " tokens"
        )
    pages = cache_properties(engine.ranks[min(engine.ranks)][1])
    if pages.cross_layers_blocks:
        parts.append("all layers of a block in one page")
    elif pages.is_kv_layout_blocks_first:
        parts.append("K and V of a block in one page")
    if shards:
        parts.append(f"tokens shared by {max(shards)} ranks")
    if len(attention) < len(groups):
        parts.append("states")
    return ", ".join(parts)


def format_load(explanation: Explanation) -> str:
    """Return which prefill ranks send most, by how much, and which send nothing."""
    served = {load.rank: load.num_bytes for load in explanation.loads()}
    most, mean = max(served.values()), sum(served.values()) / len(served)
    if min(served.values()) == most:
        return f"every prefill rank gives {format_bytes(most)}"
    busiest = [rank for rank, given in served.items() if given == most]
    idle = [rank for rank, given in served.items() if not given]
    are, each = ("ranks are", " each") if len(busiest) > 1 else ("rank is", "")
    sentence = f"the busiest prefill {are} {format_ranks(busiest)} with {format_bytes(most)}{each}"
    sentence += f", {most / mean:.1f} times the mean"
    return sentence + (f"; not read at all: {format_ranks(idle)}" if idle else "")
