"""Hypothesis strategies: small models, and engines that hold them in any way the structs can say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from kvxferd.ids import EngineId, Generation, GroupName, Rank, RegionId
from kvxferd.layout import (
    CacheTensor,
    EngineSpec,
    Group,
    GroupKind,
    PackedBlocks,
    RankLayout,
    RegionSpec,
    TokenShard,
    UnitRange,
    pack_ids,
)


@dataclass(frozen=True)
class Component:
    """One thing that a model caches in every layer."""

    name: str
    num_units: int
    content_bytes: int
    granule: int = 1
    is_state: bool = False
    is_replicated: bool = False


@dataclass(frozen=True)
class Model:
    """What both engines run."""

    num_layers: int
    components: tuple[Component, ...]


@dataclass
class Engine:
    """A deployment: every rank's layout, and how its block lists are to be drawn."""

    spec: EngineSpec
    ranks: dict[Rank, RankLayout]
    group_facts: dict[GroupName, Group]  # token_shard apart, equal on all ranks
    steps: dict[GroupName, int] = field(default_factory=dict)  # first_token must be a multiple of it

    def spec_of(self, rank: Rank) -> EngineSpec:
        """Return one rank's spec."""
        fields = {name: getattr(self.spec, name) for name in self.spec.__struct_fields__}
        return EngineSpec(**(fields | {"pp_rank": rank.pp_rank, "tp_rank": rank.tp_rank}))


@st.composite
def models(draw: st.DrawFn) -> Model:
    """One to three layers of attention, latent, scales and state, in any mixture."""
    menu = [
        *[Component(n, draw(st.integers(1, 5)), 2 * draw(st.integers(1, 4))) for n in ("k", "v")],
        Component("latent", 1, 6, is_replicated=True),
        Component("scale", draw(st.integers(1, 4)), 2, granule=2),
        Component("conv", draw(st.integers(0, 5)), 6, is_state=True),
        Component("ssm", draw(st.integers(1, 4)), 8, is_state=True),
    ]
    chosen = draw(st.lists(st.sampled_from(menu), min_size=1, max_size=4, unique_by=lambda c: c.name))
    return Model(draw(st.integers(1, 3)), tuple(chosen))


def _cut(draw: st.DrawFn, total: int, parts: int) -> list[tuple[int, int]]:
    """Cut [0, total) into ranges, empty ones allowed where there are fewer things than parts."""
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=parts - 1, max_size=parts - 1)))
    return list(zip([0, *cuts], [*cuts, total], strict=True))


def _units(draw: st.DrawFn, component: Component, tp_size: int) -> list[tuple[UnitRange, ...]]:
    """Return each tensor-parallel rank's units: cut, replicated, dealt out, or in reverse order."""
    total = component.num_units
    if component.is_replicated or total == 0:
        return [(UnitRange(0, total),) if total else ()] * tp_size
    if tp_size > total:
        return [(UnitRange(r * total // tp_size, r * total // tp_size + 1),) for r in range(tp_size)]
    kind = draw(st.sampled_from(["cut", "cut", "dealt", "reversed"]))
    if kind == "cut":
        return [(UnitRange(a, b),) if b > a else () for a, b in _cut(draw, total, tp_size)]
    shares = [[u for u in range(total) if u % tp_size == r] for r in range(tp_size)]
    if kind == "reversed":
        shares = [list(reversed(share)) for share in shares]
    return [tuple(UnitRange(u, u + 1) for u in share) for share in shares]


def _divisors(content_bytes: int) -> list[int]:
    """Return into how many chunks a content can be cut: plain, vectorised, column-major."""
    return [number for number in range(1, content_bytes + 1) if content_bytes % number == 0]


@dataclass
class _Array:
    """An array of one component in one rank: its axes outermost first, each with length and stride."""

    order: Sequence[str]
    lengths: dict[str, int]
    inner: int  # contiguous bytes
    pad: int
    page_bytes: int  # blocks are at least so far apart

    def strides(self) -> tuple[dict[str, int], int]:
        """Return each axis's stride, and the bytes of the whole."""
        step, strides = self.inner, {}
        for axis in reversed(self.order):
            step = max(step, self.page_bytes) if axis == "b" else step
            strides[axis] = step
            step = step * self.lengths[axis] + self.pad
        return strides, step


@st.composite
def engines(draw: st.DrawFn, model: Model, name: str) -> Engine:
    """Any deployment of a model: parallel sizes, groups, block sizes, axis orders, chunks, shards."""
    tp_size, pp_size = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    attention = [c for c in model.components if not c.is_state]
    cp_size = draw(st.sampled_from([1, 1, 1, 2, 3])) if attention else 1
    groups, group_of, steps = _groups(draw, model, name, cp_size)
    spec = EngineSpec(
        EngineId(name), Generation("g"), model.num_layers, pp_size=pp_size, tp_size=tp_size * cp_size
    )
    units = {c.name: _units(draw, c, tp_size) for c in model.components}
    arrangement = _Arrangement(
        groups,
        group_of,
        orders={c.name: draw(st.permutations("Lbtuc")) for c in model.components},
        chunks={c.name: draw(st.sampled_from(_divisors(c.content_bytes))) for c in model.components},
        pads={c.name: draw(st.sampled_from([0, 0, 0, 5])) for c in model.components},
        in_pages=draw(st.booleans()),
        page_bytes=draw(st.sampled_from([0, 0, 128])),
        num_regions=draw(st.integers(1, 2)),
    )
    ranks = {}
    for pp_rank, (start, end) in enumerate(_cut(draw, model.num_layers, pp_size)):
        for tp_rank in range(tp_size * cp_size):
            held = {n: shares[tp_rank // cp_size] for n, shares in units.items()}
            layout = arrangement.layout(model, (start, end), held, tp_rank % cp_size)
            ranks[Rank(pp_rank, tp_rank)] = layout
    return Engine(spec, ranks, {g.name: g for g in groups}, steps)


def _groups(
    draw: st.DrawFn, model: Model, name: str, cp_size: int
) -> tuple[list[Group], dict[str, GroupName], dict[GroupName, int]]:
    """Put components into groups: attention in one or two, states in one."""
    groups: list[Group] = []
    group_of: dict[str, GroupName] = {}
    steps: dict[GroupName, int] = {}
    for component in model.components:
        names = [f"{name}-state"] if component.is_state else [f"{name}-a", f"{name}-b"]
        group_of[component.name] = GroupName(draw(st.sampled_from(names)))
    for group in sorted(set(group_of.values())):
        members = [c for c in model.components if group_of[c.name] == group]
        if members[0].is_state:
            groups.append(Group(group, num_blocks=4, kind=GroupKind.STATE))
            continue
        granule = max(c.granule for c in members)
        interleave = granule * draw(st.integers(1, 2)) if cp_size > 1 else 1
        per_id = draw(st.sampled_from([1, 1, 2]))
        kernel_tokens = draw(st.integers(1, 4)) * (interleave if cp_size > 1 else granule)
        window = draw(st.sampled_from([None, None, 3, 7]))
        block_tokens = kernel_tokens * per_id
        shard = TokenShard(cp_size, 0, interleave)
        groups.append(Group(group, 24, block_tokens, sliding_window=window, token_shard=shard,
                            physical_blocks_per_logical=per_id))  # fmt: skip
        steps[group] = interleave * cp_size if cp_size > 1 else granule
    return groups, group_of, steps


@dataclass(frozen=True)
class _Arrangement:
    """How an engine lays its caches out, on every rank alike."""

    groups: Sequence[Group]
    group_of: dict[str, GroupName]
    orders: dict[str, Sequence[str]]  # axes outermost first: Layer, block, token, unit, chunk
    chunks: dict[str, int]
    pads: dict[str, int]
    in_pages: bool  # all components of a group side by side in each block, else arrays of their own
    num_regions: int
    page_bytes: int

    def layout(
        self, model: Model, layers: tuple[int, int], units: dict[str, tuple[UnitRange, ...]], shard_index: int
    ) -> RankLayout:
        """Return the layout of a rank that holds these layers and units."""
        tensors: list[CacheTensor] = []
        used = [0] * self.num_regions
        own = [_with_index(group, shard_index) for group in self.groups]
        for number, group in enumerate(own):
            region = number % self.num_regions
            at = used[region]
            placed: list[tuple[Component, dict[str, int], int]] = []
            for component in model.components:
                if self.group_of[component.name] == group.name:
                    num_units = sum(r.stop - r.start for r in units[component.name])
                    strides, size = self._array(component, group, layers[1] - layers[0], num_units).strides()
                    placed.append((component, strides, at))
                    at += size
            page = at - used[region]
            for component, strides, offset in placed:
                step = strides | {"b": page} if self.in_pages else strides
                tensors.extend(
                    self._tensor(
                        component,
                        layer=layer,
                        region=RegionId(f"r{region}"),
                        start=offset + (layer - layers[0]) * step["L"],
                        step=step,
                        units=units[component.name],
                    )
                    for layer in range(*layers)
                )
            blocks = group.num_blocks * group.physical_blocks_per_logical
            used[region] += page * blocks if self.in_pages else page
        sizes = tuple(RegionSpec(RegionId(f"r{i}"), max(size, 1)) for i, size in enumerate(used))
        return RankLayout(layers[0], layers[1], tuple(own), tuple(tensors), sizes)

    def _array(self, component: Component, group: Group, num_layers: int, num_units: int) -> _Array:
        per_id = group.physical_blocks_per_logical
        lengths = {
            "L": num_layers,
            "b": group.num_blocks * per_id,
            "t": 1 if component.is_state else group.block_tokens // per_id // component.granule,
            "u": num_units,
            "c": self.chunks[component.name],
        }
        order = [a for a in self.orders[component.name] if not (self.in_pages and a == "b")]
        inner = component.content_bytes // self.chunks[component.name]
        return _Array(order, lengths, inner, self.pads[component.name], self.page_bytes)

    def _tensor(
        self,
        component: Component,
        *,
        layer: int,
        region: RegionId,
        start: int,
        step: dict[str, int],
        units: tuple[UnitRange, ...],
    ) -> CacheTensor:
        return CacheTensor(
            layer=layer,
            component=component.name,
            group=self.group_of[component.name],
            region=region,
            offset=start,
            block_stride=step["b"],
            token_stride=0 if component.is_state else step["t"],
            unit_stride=step["u"],
            units=units,
            chunk_bytes=component.content_bytes // self.chunks[component.name],
            num_chunks=self.chunks[component.name],
            chunk_stride=step["c"],
            granule_tokens=component.granule,
        )


def _with_index(group: Group, shard_index: int) -> Group:
    """Return the group as the rank with this place among the token shards holds it."""
    if group.token_shard.count == 1:
        return group
    shard = TokenShard(group.token_shard.count, shard_index, group.token_shard.interleave)
    fields = {name: getattr(group, name) for name in group.__struct_fields__}
    return Group(**(fields | {"token_shard": shard}))


@st.composite
def lists(draw: st.DrawFn, engine: Engine, num_tokens: int, latest: int) -> dict[GroupName, PackedBlocks]:
    """Draw a request's block lists on one engine, beginning at `latest` tokens at the latest."""
    found = {}
    for name, group in engine.group_facts.items():
        ids = draw(st.permutations(range(group.num_blocks)))
        if draw(st.booleans()):
            ids = sorted(ids) if draw(st.booleans()) else sorted(ids, reverse=True)
        if group.kind is GroupKind.STATE:
            size = draw(st.integers(1, 3))
            found[name] = PackedBlocks(pack_ids(ids[:size]), state_at=num_tokens)
            continue
        span = group.block_tokens * group.token_shard.count
        first = draw(st.integers(0, latest)) // engine.steps[name] * engine.steps[name]
        first = max(first, num_tokens - span * group.num_blocks)
        first = -(-first // engine.steps[name]) * engine.steps[name]
        size = max(0, -(-(num_tokens - first) // span))
        skip = draw(st.integers(0, group.num_blocks - size))
        found[name] = PackedBlocks(pack_ids(ids[skip : skip + size]), first_token=first)
    return found


def required_from(sink: Engine, mine: dict[GroupName, PackedBlocks], num_tokens: int) -> dict[GroupName, int]:
    """Return the first token that must arrive in each group; `num_tokens` where none must."""
    return {
        name: max(mine[name].first_token, num_tokens - (group.sliding_window or num_tokens))
        if mine[name].ids
        else num_tokens
        for name, group in sink.group_facts.items()
    }


@dataclass(frozen=True)
class Pull:
    """One rank of an engine reads a request of another: both engines, and the block lists of either."""

    sink: Engine
    source: Engine
    rank: Rank
    num_tokens: int
    mine: dict[GroupName, PackedBlocks]
    theirs: dict[GroupName, PackedBlocks]


@st.composite
def pulls(draw: st.DrawFn) -> Pull:
    """Any pull between any two deployments of a model; it may be one that has to be refused."""
    model: Model = draw(models())
    sink, source = draw(engines(model, "sink")), draw(engines(model, "source"))
    num_tokens = draw(st.integers(1, 40))
    rank = draw(st.sampled_from(sorted(sink.ranks)))
    mine, theirs = (draw(lists(engine, num_tokens, latest=num_tokens - 1)) for engine in (sink, source))
    return Pull(sink, source, rank, num_tokens, mine, theirs)


def lacks_tokens(pull: Pull) -> bool:
    """Whether some group of the sink requires a token before some list of the source begins."""
    begins = [
        pull.theirs[g.name].first_token
        for g in pull.source.group_facts.values()
        if g.kind is not GroupKind.STATE
    ]
    needs = [
        max(pull.mine[g.name].first_token, pull.num_tokens - (g.sliding_window or pull.num_tokens))
        for g in pull.sink.group_facts.values()
        if g.kind is not GroupKind.STATE and pull.mine[g.name].ids
    ]
    return any(need < begin for need in needs for begin in begins)
