"""Caches of compressed states, rings and packed pages, written and checked byte by byte.

A page is written as the kernels of vLLM 0.33 write it, by sums that are repeated here and share nothing with
the derivation: each state's content at its own place, or, where a block has all values before all scales
(`parts`), each part at its own. Pages lie as vLLM places them: those of a group side by side in each block of
one allocation, from its first byte on whatever the group (`is_packed`), or each cache in an allocation of its
own.
"""

from __future__ import annotations

import dataclasses
import math
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
from tests.support.in_process_pull import move

Bytes = npt.NDArray[np.uint8]
POISON = 0xEE
DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclasses.dataclass(frozen=True)
class Cache:
    """One cache of one layer. `facts` are of an engine whose tensor parallelism is 1."""

    name: str
    group: int
    backend: str
    facts: AttentionFacts
    parts: tuple[int, ...] = ()  # bytes of what a block holds apart; none: a state's content lies together
    is_divided: bool = False  # its heads are divided over the ranks

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
    block_tokens: int = 0  # of the full groups; 0: the family's own
    kernel_blocks: int = 1  # in a block of the full groups; more than one needs pages that are not packed
    is_packed: bool = True
    order: str = "HN"  # of slots and states in a page
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

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a kernel block."""
        return self.facts.num_slots * self.num_states * self.facts.content_bytes

    def tensor(self, memory: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """Return it as [blocks, slots, states, content]."""
        facts = self.facts
        shape = num_blocks * self.per_id, facts.num_slots, self.num_states, facts.content_bytes
        raw = torch.as_strided(memory, shape, (self.block_stride, *self.strides, 1), self.start)
        return raw.view(DTYPES[facts.itemsize])

    def ranges(self, block: int, slot: int, state: int) -> Iterator[tuple[int, int]]:
        """Yield (start, size) of the pieces of a state's content, in a kernel block's row."""
        page = self.start + block * self.block_stride
        per_slot, per_state = self.strides
        if not self.cache.parts:
            yield page + slot * per_slot + state * per_state, self.facts.content_bytes
            return
        for size in self.cache.parts:
            yield page + state * size, size
            page += self.num_states * size


class PagedRank:
    """One worker: its memory, and what was derived of it."""

    def __init__(self, family: Family, how: How, tp_rank: int) -> None:
        self.family, self.how, self.tp_rank = family, how, tp_rank
        self.group_of = {group.index: group for group in family.groups}
        self.memory, self.placed, tensors = self.place()
        layers = [
            LayerFacts(
                one.cache.name,
                one.cache.group,
                one.facts,
                one.cache.backend,
                implementation=f"vllm.backends.{one.cache.backend}",
                has_mx_scales=how.has_mx_scales,
                cache_dtype="auto",
            )
            for one in self.placed
        ]
        worker = WorkerFacts(
            0,
            family.num_layers,
            family.num_layers,
            family.num_heads,
            tp_size=how.tp,
            tp_rank=tp_rank,
            num_blocks=how.num_blocks,
            vllm_version=how.version,
            device=how.device,
        )
        groups = CacheGroups(family.groups, len(family.groups))
        self.derived = derive_layout(tensors, layers, groups, worker)

    def place(self) -> tuple[torch.Tensor, list[PlacedCache], dict[str, torch.Tensor]]:
        """Return poisoned memory, where each cache lies in it, and the tensors that vLLM registers."""
        family, how = self.family, self.how
        pages = [(cache, *self._page(cache)) for cache in family.caches]
        per_block = dict.fromkeys(self.group_of, 0)
        for cache, _, _, size in pages:
            per_block[cache.group] += size
        block_stride = max(per_block.values())
        start, at = 0, dict.fromkeys(self.group_of, 0)
        placed = []
        for cache, states, per_id, size in pages:
            if how.is_packed:
                place = at[cache.group], block_stride
                at[cache.group] += size
            else:
                place = start, size // per_id
                start += size * how.num_blocks
            facts = cache.of_rank(how.tp)
            content, slots = facts.content_bytes, facts.num_slots
            strides = (states * content, content) if how.order == "HN" else (content, slots * content)
            placed.append(PlacedCache(cache, facts, *place, strides, states, per_id))
        num_bytes = block_stride * how.num_blocks if how.is_packed else start
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
        return (self.tp_rank * heads // self.how.tp) // per_rank * per_rank + slot

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
            f"rank {self.tp_rank}: {what}"
            for what, start, content in self.written(lists, num_tokens)
            if not (memory[start : start + len(content)] == content).all()
        ]
        used = {group: [block for block in ids if block] for group, ids in lists.items()}
        if (memory[~self.pages(used)] != POISON).any():
            found.append(f"rank {self.tp_rank}: bytes outside the request's pages have changed")
        return found

    def pages(self, lists: Mapping[int, Sequence[int]]) -> npt.NDArray[np.bool_]:
        """Return which bytes are of pages of these blocks."""
        inside = np.zeros(len(self.memory), dtype=np.bool_)
        for one in self.placed:
            for block in lists[one.cache.group]:
                for kernel in range(block * one.per_id, (block + 1) * one.per_id):
                    start = one.start + kernel * one.block_stride
                    inside[start : start + one.page_bytes] = True
        return inside


class PagedEngine:
    """All workers of an engine."""

    def __init__(self, family: Family, how: How, rank_type: type[PagedRank] = PagedRank) -> None:
        self.family = family.with_blocks(how.block_tokens) if how.block_tokens else family
        self.how = how
        self.groups = CacheGroups(self.family.groups, len(self.family.groups))
        self.ranks = {Rank(0, rank): rank_type(self.family, how, rank) for rank in range(how.tp)}

    def spec(self, tp_rank: int = 0) -> EngineSpec:
        """Return a rank's spec."""
        return EngineSpec(
            "e",
            "g",
            self.family.num_layers,
            tp_size=self.how.tp,
            tp_rank=tp_rank,
            num_kv_heads=self.family.num_heads,
        )

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
            sink.spec(rank.tp_rank),
            held.derived,
            source.spec(),
            source.derived,
            into=sink.select(mine, num_tokens),
            published=source.select(theirs, num_tokens),
            num_tokens=num_tokens,
        )
        wrong += held.wrong(mine, num_tokens)
    return wrong
