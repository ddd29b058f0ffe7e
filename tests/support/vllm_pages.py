"""vLLM's caches of any model, written and checked byte by byte.

A page is written as the kernels of vLLM write it, by sums that are repeated here and share nothing with the
derivation: each state's content at its own place; where a block has all values before all scales (`parts`),
each part at its own; and where a CPU's attention packs a block for its instruction set (`isa`), each element.
Pages lie as vLLM 0.33 places them in each order of layers, blocks, heads and tokens (`LAYOUTS`): those of a
group side by side in each block, from its first byte on whatever the group, or each cache by itself.
"""

from __future__ import annotations

import dataclasses
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvxferd.client import BlockList
from kvxferd.ids import Rank
from kvxferd.integrations.vllm.layout.derivation import DerivedCaches, derive_layout
from kvxferd.integrations.vllm.layout.facts import (
    AttentionFacts,
    CacheGroup,
    CacheKind,
    LayerFacts,
    WorkerFacts,
)
from kvxferd.integrations.vllm.layout.groups import CacheGroups
from kvxferd.layout import EngineSpec
from kvxferd.layout.sharding import stage_layers
from tests.support.in_process_pull import move

Bytes = npt.NDArray[np.uint8]
POISON = 0xEE
DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
FLASH, CPU = "FlashAttentionBackend", "CPUAttentionBackend"


@dataclasses.dataclass(frozen=True)
class Cache:
    """One cache of one layer. `facts` are of an engine whose tensor parallelism is 1."""

    name: str
    group: int
    backend: str
    facts: AttentionFacts
    parts: tuple[int, ...] = ()  # bytes of what a block holds apart; none: a state's content lies together
    is_divided: bool = False  # its heads are divided over the ranks
    isa: str = ""  # for which `CPU` packs a block

    @property
    def layer(self) -> int:
        """Return the number of its layer."""
        return int(re.findall(r"layers\.(\d+)", self.name)[0])

    def content(self, unit: int, state: int) -> Bytes:
        """Return the bytes of a head, or of a slot, of one state: no two are alike, and none is poison."""
        seed = zlib.crc32(f"{self.name} {unit} {state}".encode())
        return np.random.default_rng(seed).integers(1, POISON, self.facts.content_bytes, dtype=np.uint8)

    def of_rank(self, tp: int) -> AttentionFacts:
        """Return the facts of one of `tp` ranks."""
        if not self.is_divided:
            return self.facts
        return dataclasses.replace(self.facts, num_heads=max(1, self.facts.num_heads // tp))


@dataclasses.dataclass(frozen=True)
class Family:
    """A model's caches, and its groups for some number of tokens in a block of the full ones."""

    name: str
    caches: tuple[Cache, ...]
    groups: tuple[CacheGroup, ...]
    num_heads: int = 0  # that tensor parallelism divides
    num_layers: int = 2

    def with_blocks(self, block_tokens: int) -> Family:
        """Return the same model with so many tokens in a block of its full groups."""
        groups = [
            dataclasses.replace(group, block_tokens=block_tokens) if group.kind is CacheKind.FULL else group
            for group in self.groups
        ]
        return dataclasses.replace(self, groups=tuple(groups))


@dataclasses.dataclass(frozen=True)
class How:
    """How an engine is deployed."""

    tp: int = 1
    pp: int = 1
    block_tokens: int = 0  # of the full groups; 0: the family's own
    kernel_blocks: int = 1  # in a block of the full groups; more than one needs caches by themselves
    layout: str = "BLHNC"
    isa: str = ""  # of a CPU, whose backend all caches then have
    num_blocks: int = 24
    padding: int = 0  # bytes behind each page
    version: str = "0.33.0"
    device: str = "NVIDIA H100 9.0"
    has_mx_scales: bool = False

    def __str__(self) -> str:
        """Return what is not as usual, for the name of a test."""
        usual = [field.default for field in dataclasses.fields(self)]
        given = zip(dataclasses.fields(self), dataclasses.astuple(self), usual, strict=True)
        return " ".join(f"{field.name}={value}" for field, value, default in given if value != default)


@dataclasses.dataclass(frozen=True)
class PlacedCache:
    """A cache of one rank in the rank's memory."""

    cache: Cache
    facts: AttentionFacts
    start: int  # of its page in block 0
    block_stride: int  # from one kernel block to the next
    strides: tuple[int, int]  # from slot to slot, and from state to state
    num_states: int  # of a kernel block
    per_id: int

    def bytes_in(self, memory: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """Return it as [blocks, slots, states, bytes]; `memory` has an element for each byte."""
        facts = self.facts
        shape = num_blocks * self.per_id, facts.num_slots, self.num_states, facts.content_bytes
        return torch.as_strided(memory, shape, (self.block_stride, *self.strides, 1), self.start)

    def tensor(self, memory: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """Return it as [blocks, slots, states, content]."""
        return self.bytes_in(memory, num_blocks).view(DTYPES[self.facts.itemsize])

    def ranges(self, block: int, slot: int, state: int) -> Iterator[tuple[int, int]]:
        """Yield (start, size) of the pieces of a state's content, in a kernel block's row."""
        page = self.start + block * self.block_stride
        per_slot, per_state = self.strides
        if self.cache.isa:
            for first, size in self._cpu_elements(state):
                yield page + slot * per_slot + first * self.facts.itemsize, size * self.facts.itemsize
            return
        if not self.cache.parts:
            yield page + slot * per_slot + state * per_state, self.facts.content_bytes
            return
        for size in self.cache.parts:
            yield page + state * size, size
            page += self.num_states * size

    def _cpu_elements(self, state: int) -> Iterator[tuple[int, int]]:
        """Yield (first, count) of the elements of a token's key, then of its value, in a head's block.

        A block has all keys before all values: keys are column-major and values as they are; or, for "amx",
        tiles of 16 tokens have keys by pairs of elements, and tiles of 16 elements values by pairs of tokens.
        """
        size, num_states = self.facts.head_size, self.num_states
        values = size * num_states
        if self.cache.isa != "amx":
            yield from ((element * num_states + state, 1) for element in range(size))
            yield values + state * size, size
            return
        tile, row = divmod(state, 16)
        yield from (((tile * size // 2 + pair) * 32 + row * 2, 2) for pair in range(size // 2))
        for element in range(size):
            tile, row = divmod(element, 16)
            yield values + (tile * num_states // 2 + state // 2) * 32 + row * 2 + state % 2, 1


class PagedRank:
    """One worker: its memory, and what was derived of it."""

    def __init__(self, family: Family, how: How, rank: Rank) -> None:
        self.how, self.rank = how, rank
        stage = stage_layers(family.num_layers, how.pp, rank.pp_rank)
        self.caches = [cache for cache in family.caches if cache.layer in range(*stage)]
        if how.isa:
            self.caches = [dataclasses.replace(cache, backend=CPU, isa=how.isa) for cache in self.caches]
        self.group_of = {group.index: group for group in family.groups}
        self.memory, self.placed, tensors = self.place()
        layers = [
            LayerFacts(
                one.cache.name,
                one.cache.group,
                one.facts,
                one.cache.backend,
                one.cache.isa,
                implementation=f"vllm.backends.{one.cache.backend}",
                has_mx_scales=how.has_mx_scales,
                cache_dtype="auto",
            )
            for one in self.placed
        ]
        worker = WorkerFacts(
            *stage,
            family.num_layers,
            family.num_heads,
            tp_size=how.tp,
            tp_rank=rank.tp_rank,
            pp_size=how.pp,
            pp_rank=rank.pp_rank,
            num_blocks=how.num_blocks,
            vllm_version=how.version,
            device=how.device,
        )
        groups = CacheGroups(family.groups, len(family.groups))
        self.derived = derive_layout(tensors, layers, groups, worker)

    def place(self) -> tuple[torch.Tensor, list[PlacedCache], dict[str, torch.Tensor]]:
        """Return poisoned memory, where each cache lies in it, and the tensors that vLLM registers."""
        how = self.how
        pages = [(cache, *self._page(cache)) for cache in self.caches]
        per_block = dict.fromkeys(self.group_of, 0)
        for cache, _, _, size in pages:
            per_block[cache.group] += size
        block_stride = max(per_block.values())
        start, at = 0, dict.fromkeys(self.group_of, 0)
        placed = []
        for cache, states, per_id, size in pages:
            facts = cache.of_rank(how.tp)
            content, slots = facts.content_bytes, facts.num_slots
            strides = (content, slots * content) if "NH" in how.layout else (states * content, content)
            if how.layout.startswith("B"):
                place = at[cache.group], block_stride
                at[cache.group] += size
            else:
                place = start, size // per_id
                start += size * how.num_blocks
            if how.layout == "LHBNC":
                place, strides = (place[0], strides[0]), (strides[0] * how.num_blocks * per_id, content)
            elif how.layout == "BHLNC":  # of caches that are alike
                place, strides = (place[0] // slots, block_stride), (block_stride // slots, content)
            placed.append(PlacedCache(cache, facts, *place, strides, states, per_id))
        num_bytes = start or block_stride * how.num_blocks
        memory = self.allocate(num_bytes).fill_(POISON)
        return memory, placed, {one.cache.name: one.tensor(memory, how.num_blocks) for one in placed}

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return the rank's memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def _page(self, cache: Cache) -> tuple[int, int, int]:
        """Return the states of a kernel block, the kernel blocks of an id, and the bytes of an id."""
        group = self.group_of[cache.group]
        per_id = self.how.kernel_blocks if group.kind is CacheKind.FULL else 1
        states = group.block_tokens // per_id // cache.facts.tokens_per_state
        facts = cache.of_rank(self.how.tp)
        size = facts.num_slots * states * facts.content_bytes * per_id
        return states, per_id, size + (self.how.padding if per_id == 1 else 0)

    def unit(self, cache: Cache, slot: int) -> int:
        """Return which of the model's heads, or of a cache's slots, one slot of this rank is."""
        if not cache.is_divided:
            return slot
        heads = cache.facts.num_heads
        per_rank = max(1, heads // self.how.tp)
        return (self.rank.tp_rank * heads // self.how.tp) // per_rank * per_rank + slot

    def states(self, num_tokens: int) -> Iterator[tuple[PlacedCache, range]]:
        """Yield each cache with the states that a request's prefill has written."""
        for one in self.placed:
            group = self.group_of[one.cache.group]
            if group.kind is CacheKind.STATE:
                yield one, range(max(0, num_tokens - one.num_states), num_tokens)
            else:
                first = 0 if group.kept_tokens is None else max(0, num_tokens - group.kept_tokens)
                per_state = one.facts.tokens_per_state
                yield one, range(-(-first // per_state), num_tokens // per_state)

    def pieces(self, one: PlacedCache, ids: Sequence[int], state: int) -> Iterator[tuple[int, Bytes]]:
        """Yield (place in memory, bytes) of one state of a request with these blocks."""
        if self.group_of[one.cache.group].kind is CacheKind.STATE:
            block, row = ids[0], state % one.num_states
        else:
            position, row = divmod(state, one.num_states)
            block = ids[position // one.per_id] * one.per_id + position % one.per_id
        for slot in range(one.facts.num_slots):
            content = one.cache.content(self.unit(one.cache, slot), state)
            for start, size in one.ranges(block, slot, row):
                yield start, content[:size]
                content = content[size:]

    def written(
        self, lists: Mapping[int, Sequence[int]], num_tokens: int
    ) -> Iterator[tuple[str, int, Bytes]]:
        """Yield (what, place in memory, bytes) of everything that a request's prefill writes here."""
        for one, states in self.states(num_tokens):
            for state in states:
                for start, content in self.pieces(one, lists[one.cache.group], state):
                    yield f"{one.cache.name}, state {state}", start, content

    def wrong(self, lists: Mapping[int, Sequence[int]], num_tokens: int) -> list[str]:
        """Return what of a request is not here, and whether bytes beside its pages have changed."""
        memory = self.memory.numpy()
        found = [
            f"rank {self.rank}: {what}"
            for what, start, content in self.written(lists, num_tokens)
            if not (memory[start : start + len(content)] == content).all()
        ]
        used = {group: [block for block in ids if block] for group, ids in lists.items()}
        if (memory[~self.pages(used)] != POISON).any():
            found.append(f"rank {self.rank}: bytes outside the request's pages have changed")
        return found

    def pages(self, lists: Mapping[int, Sequence[int]]) -> npt.NDArray[np.bool_]:
        """Return which bytes are of pages of these blocks."""
        inside = torch.zeros(len(self.memory), dtype=torch.bool)
        for one in self.placed:
            pages = one.bytes_in(inside, self.how.num_blocks)
            for block in lists[one.cache.group]:
                pages[block * one.per_id : (block + 1) * one.per_id] = True
        return inside.numpy()


class PagedEngine:
    """All workers of an engine."""

    def __init__(self, family: Family, how: How, rank_type: type[PagedRank] = PagedRank) -> None:
        self.family = family.with_blocks(how.block_tokens) if how.block_tokens else family
        self.how = how
        self.groups = CacheGroups(self.family.groups, len(self.family.groups))
        ranks = [Rank(pp, tp) for pp in range(how.pp) for tp in range(how.tp)]
        self.ranks = {rank: rank_type(self.family, how, rank) for rank in ranks}

    def spec(self, rank: tuple[int, int] = (0, 0)) -> EngineSpec:
        """Return a rank's spec."""
        family, how = self.family, self.how
        return EngineSpec("e", "g", family.num_layers, how.pp, how.tp, *rank, family.num_heads)

    @property
    def derived(self) -> dict[Rank, DerivedCaches]:
        """What was derived of each rank."""
        return {rank: held.derived for rank, held in self.ranks.items()}

    def block_lists(self, num_tokens: int, step: int) -> dict[int, list[int]]:
        """Return vLLM's list of each group for a request: no block is in two of them, and 0 is no block."""
        assert math.gcd(step, self.how.num_blocks - 1) == 1
        free = [1 + number * step % (self.how.num_blocks - 1) for number in range(self.how.num_blocks - 1)]
        lists: dict[int, list[int]] = {}
        for group in self.family.groups:
            count = 1 if group.kind is CacheKind.STATE else -(-num_tokens // group.block_tokens)
            kept = 0 if group.kept_tokens is None else max(0, num_tokens - group.kept_tokens)
            nulls = kept // group.block_tokens
            lists[group.index] = [0] * nulls + [free.pop() for _ in range(count - nulls)]
        return lists

    def select(
        self, lists: Mapping[int, Sequence[int]], num_tokens: int, num_cached: int = 0
    ) -> dict[str, BlockList]:
        """Return the lists of a transfer."""
        listed = [lists[group.index] for group in self.family.groups]
        return self.groups.select_blocks(listed, num_tokens, num_cached)


def pull(sink: PagedEngine, source: PagedEngine, num_tokens: int) -> list[str]:
    """Write a request at the source, and read it into every rank of the sink; return what is wrong there."""
    theirs, mine = source.block_lists(num_tokens, 5), sink.block_lists(num_tokens, 7)
    for held in (*source.ranks.values(), *sink.ranks.values()):
        held.memory.fill_(POISON)
    for held in source.ranks.values():
        memory = held.memory.numpy()
        for _, start, content in held.written(theirs, num_tokens):
            memory[start : start + len(content)] = content
    wrong = []
    for rank, held in sink.ranks.items():
        move(
            sink.spec(rank),
            held.derived,
            source.spec(),
            source.derived,
            into=sink.select(mine, num_tokens),
            published=source.select(theirs, num_tokens),
            num_tokens=num_tokens,
        )
        wrong += held.wrong(mine, num_tokens)
    return wrong
