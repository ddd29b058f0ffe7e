"""Ranks, layers and units as people write them; shared by the text and the picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvxferd.cli.explain.descriptions import Engine
from kvxferd.cli.showing import in_bytes
from kvxferd.ids import Rank
from kvxferd.layout import GroupKind, UnitRange


def spans(numbers: Iterable[int]) -> str:
    """Return whole numbers as ranges, both ends included: ``0-3, 7``. Many ranges end in their count."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in ranges]
    if len(texts) > 4:
        return f"{sum(b - a + 1 for a, b in ranges)} of {ranges[0][0]}-{ranges[-1][1]}"
    return ", ".join(texts)


def ranks_in_short(ranks: Sequence[Rank]) -> str:
    """Return ranks stage by stage: ``pp0.tp0-3, pp1.tp0-3``."""
    stages: dict[int, list[int]] = {}
    for rank in ranks:
        stages.setdefault(rank.pp_rank, []).append(rank.tp_rank)
    return ", ".join(f"pp{pp}.tp{spans(tps).replace(', ', '+')}" for pp, tps in stages.items()) or "-"


def units_in_short(units: Mapping[str, tuple[UnitRange, ...]]) -> str:
    """Return components with equal units together: ``k v heads 0-3``."""
    together: dict[str, list[str]] = {}
    for name, held in units.items():
        together.setdefault(_held(held), []).append(name)
    return "; ".join(f"{_word(names)} {held}".strip() for held, names in together.items())


def heads_in_short(units: Mapping[str, tuple[UnitRange, ...]]) -> str:
    """Return the heads read, without component names; "latent" where there is nothing to divide."""
    for name in ("k", "v", "kv", "ssm"):
        if name in units:
            return "h" + _held(units[name])
    return "latent" if "latent" in units else next(iter(units), "")


def _held(ranges: tuple[UnitRange, ...]) -> str:
    return spans(unit for held in ranges for unit in range(held.start, held.stop))


def _word(names: list[str]) -> str:
    heads = set(names) <= {"k", "v", "kv"}
    if heads:
        return f"{' '.join(names)} heads"
    return " ".join(names)


def engine_in_short(engine: Engine) -> str:
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
    if shards:
        parts.append(f"tokens shared by {max(shards)} ranks")
    if len(attention) < len(groups):
        parts.append("states")
    return ", ".join(parts)


def size(num_bytes: float) -> str:
    """Return a size, "-" for nothing."""
    return in_bytes(num_bytes) if num_bytes else "-"
