"""Recurrent states: what one engine's layers wrote another's read, in either convolution layout and any TP.

Pages are vLLM's: int8 [blocks, 1, 1, bytes], block after block padded to a common size, the parts cut
out and viewed as MambaBase.bind_kv_cache does (vllm/model_executor/layers/mamba/abstract.py).
"""

from __future__ import annotations

import dataclasses
from math import prod
from typing import Any

import pytest
import torch

from kvxferd.errors import LayoutError, PlanError
from kvxferd.ids import Rank
from kvxferd.integrations.vllm.layout.derivation import DerivedCaches, derive_layout
from kvxferd.integrations.vllm.layout.facts import CacheGroup, CacheKind, LayerFacts, StateFacts, WorkerFacts
from kvxferd.integrations.vllm.layout.groups import CacheGroups
from kvxferd.layout import EngineSpec, UnitRange
from tests.support.in_process_pull import move

NUM_BLOCKS = 5


@dataclasses.dataclass(frozen=True)
class Mixer:
    """A model's recurrent layer: its convolution's parts and its state, over all ranks."""

    name: str
    parts: tuple[tuple[int, int], ...]  # units and columns of each
    heads: int = 0  # of the state
    state: tuple[int, ...] = ()  # of one head
    num_groups: int | None = None
    rows: int = 3  # the kernel's width less one, and more with speculation

    def held(self, units: int, tp: int, rank: int) -> range:
        """Which units a rank holds: an even share, or a copy of the only one."""
        if units == 1:
            return range(1)
        return range(units // tp * rank, units // tp * (rank + 1))


MAMBA2 = Mixer("mamba2", ((8, 4), (2, 6), (2, 6)), 8, (4, 6), num_groups=2)
ONE_GROUP = Mixer("mamba2", ((8, 4), (1, 6), (1, 6)), 8, (4, 6), num_groups=1)
GDN = Mixer("gdn_attn", ((4, 6), (4, 6), (8, 4)), 8, (4, 6))
MAMBA1 = Mixer("mamba1", ((16, 1),), 16, (5,))
SHORT_CONV = Mixer("short_conv", ((16, 1),))
LINEAR = Mixer("linear", (), 4, (3, 3))


class StateEngine:
    """Every rank of one layer."""

    def __init__(self, mixer: Mixer, tp: int, *, is_conv_dim_first: bool, page_bytes: int = 0) -> None:
        self.mixer, self.tp, self.is_ds = mixer, tp, is_conv_dim_first
        self.groups = CacheGroups((CacheGroup(0, CacheKind.STATE, 512),), 1)
        self.states: dict[Rank, list[torch.Tensor]] = {}
        self.ranks: dict[Rank, DerivedCaches] = {}
        for number in range(tp):
            self._add(number, page_bytes)

    def spec(self, rank: int = 0) -> EngineSpec:
        return EngineSpec("e", "g", 2, tp_size=self.tp, tp_rank=rank)

    def _add(self, number: int, page_bytes: int) -> None:
        mixer = self.mixer
        shapes, dtypes = [], []
        if mixer.parts:
            columns = sum(len(mixer.held(u, self.tp, number)) * width for u, width in mixer.parts)
            shapes.append((columns, mixer.rows) if self.is_ds else (mixer.rows, columns))
            dtypes.append(torch.int16)
        if mixer.heads:
            shapes.append((len(mixer.held(mixer.heads, self.tp, number)), *mixer.state))
            dtypes.append(torch.int32)
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        stride = max(sum(sizes), page_bytes)
        buffer = torch.zeros(NUM_BLOCKS * stride, dtype=torch.int8)
        page = torch.as_strided(buffer, (NUM_BLOCKS, 1, 1, sum(sizes)), (stride, sum(sizes), sum(sizes), 1))
        views, start = [], 0
        for shape, dtype, size in zip(shapes, dtypes, sizes, strict=True):
            views.append(page[:, 0, 0, start : start + size].view(dtype).view(NUM_BLOCKS, *shape))
            start += size
        facts = StateFacts(
            mixer.name,
            tuple(shapes),
            tuple((str(dtype).removeprefix("torch."), dtype.itemsize) for dtype in dtypes),
            self.is_ds,
            num_groups=mixer.num_groups,
        )
        worker = WorkerFacts(0, 2, 2, 0, tp_size=self.tp, tp_rank=number, num_blocks=NUM_BLOCKS)
        layers = [LayerFacts("model.layers.1.mixer", 0, facts)]
        rank = Rank(0, number)
        self.ranks[rank] = derive_layout({"model.layers.1.mixer": page}, layers, self.groups, worker)
        self.states[rank] = views

    def content(self, rank: Rank) -> list[torch.Tensor]:
        """Return what the rank's states must be: a number for every column and row, and of every head."""
        content = []
        if self.mixer.parts:
            columns = []
            for part, (units, width) in enumerate(self.mixer.parts):
                held = self.mixer.held(units, self.tp, rank.tp_rank)
                own = torch.arange(held.start * width, held.stop * width)
                rows = self.mixer.rows
                columns.append(part * 4096 + own[:, None] * rows + torch.arange(rows) + 1)
            together = torch.cat(columns).to(torch.int16)
            content.append(together if self.is_ds else together.T)
        if self.mixer.heads:
            held = self.mixer.held(self.mixer.heads, self.tp, rank.tp_rank)
            everything = torch.arange(self.mixer.heads * prod(self.mixer.state), dtype=torch.int32) + 70000
            content.append(everything.view(-1, *self.mixer.state)[held.start : held.stop])
        return content

    def write(self, block: int) -> None:
        for rank, views in self.states.items():
            for view, content in zip(views, self.content(rank), strict=True):
                view[block] = content


def pull(sink: StateEngine, source: StateEngine) -> int:
    """Move the state of a request of 9 tokens, and check every rank of the sink; returns the runs."""
    source.write(3)
    published, into = source.groups.select_blocks([[3]], 9), sink.groups.select_blocks([[2]], 9)
    runs = 0
    for number in range(sink.tp):
        rank = Rank(0, number)
        runs += move(
            sink.spec(number),
            sink.ranks[rank],
            source.spec(),
            source.ranks,
            into=into,
            published=published,
            num_tokens=9,
        )
        for view, content in zip(sink.states[rank], sink.content(rank), strict=True):
            assert torch.equal(view[2], content)
            assert not view[[0, 1, 3, 4]].any()
    return runs


@pytest.mark.parametrize("mixer", [MAMBA2, ONE_GROUP, GDN, MAMBA1, SHORT_CONV, LINEAR], ids=lambda m: m.name)
@pytest.mark.parametrize(("sink_tp", "source_tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(
    ("sink_ds", "source_ds"), [(True, True), (False, False), (True, False), (False, True)]
)
def test_states_are_read_across_sizes_and_layouts(
    mixer: Mixer, sink_tp: int, source_tp: int, sink_ds: bool, source_ds: bool
) -> None:
    sink = StateEngine(mixer, sink_tp, is_conv_dim_first=sink_ds, page_bytes=2048)
    assert pull(sink, StateEngine(mixer, source_tp, is_conv_dim_first=source_ds)) > 0


def test_ranks_beyond_the_only_group_hold_copies_of_it() -> None:
    sink = StateEngine(ONE_GROUP, 8, is_conv_dim_first=True)
    pull(sink, StateEngine(ONE_GROUP, 4, is_conv_dim_first=False))
    (part,) = {t.units for d in sink.ranks.values() for t in d.layout.tensors if t.component == "conv.B"}
    assert [(units.start, units.stop) for units in part] == [(0, 6)]


def test_equal_layouts_move_in_few_runs() -> None:
    """A channel is a unit, and the runs are as long as the parts."""
    same = StateEngine(MAMBA2, 1, is_conv_dim_first=True), StateEngine(MAMBA2, 1, is_conv_dim_first=True)
    assert pull(*same) == 1
    rows = StateEngine(MAMBA2, 1, is_conv_dim_first=False), StateEngine(MAMBA2, 1, is_conv_dim_first=False)
    assert pull(*rows) == 1
    assert pull(StateEngine(MAMBA2, 2, is_conv_dim_first=True), same[1]) == 2 * 4  # x, B, C, state; each rank


def facts(mixer: str, *shapes: tuple[int, ...], num_groups: int | None = None) -> StateFacts:
    return StateFacts(mixer, shapes, (("bfloat16", 2),) * len(shapes), True, num_groups=num_groups)


def derived_of(state: StateFacts, *, page_bytes: int = 4096, **worker: Any) -> DerivedCaches:
    """Return what is derived of one layer's states."""
    page = torch.zeros(NUM_BLOCKS, 1, 1, page_bytes, dtype=torch.int8)
    held = WorkerFacts(0, 2, 2, 0, num_blocks=NUM_BLOCKS, **worker)
    groups = CacheGroups((CacheGroup(0, CacheKind.STATE, 512),), 1)
    name = "model.layers.1.mixer"
    layer = LayerFacts(name, 0, state, implementation="vllm.Some", cache_dtype="auto")
    return derive_layout({name: page}, [layer], groups, held)


@pytest.mark.parametrize(
    ("state", "tp", "page_bytes", "why"),
    [
        (facts("mamba2", (57, 3), (8, 4, 6)), 1, 4096, "8 heads of 4 take 32, and 25 are no two equal parts"),
        (facts("mamba2", (56, 3), (8, 4, 6)), 2, 4096, "how many groups the model has is not known"),
        (facts("mamba2", (56, 3), (8, 4, 6), num_groups=3), 2, 4096, "2 of 3 are held"),
        (facts("mamba1", (16, 3), (8, 4)), 1, 4096, "8 channels of state and 16 of convolution"),
        (facts("mamba1", (16, 3), (16, 4)), 1, 100, "cannot hold its states of 224 bytes"),
    ],
)
def test_states_that_are_not_understood_are_refused_by_name(
    state: StateFacts, tp: int, page_bytes: int, why: str
) -> None:
    with pytest.raises(LayoutError, match=r"'model\.layers\.1\.mixer'") as caught:
        derived_of(state, page_bytes=page_bytes, tp_size=tp)
    assert why in caught.value.message


def test_unequal_rows_of_the_convolution_are_refused_by_the_plan() -> None:
    """As many speculative tokens more on one side: the in-engine connector slices such states wrongly."""
    sink = StateEngine(MAMBA1, 1, is_conv_dim_first=True)
    source = StateEngine(dataclasses.replace(MAMBA1, rows=5), 1, is_conv_dim_first=True)
    with pytest.raises(PlanError, match=r"content_bytes of layer 1's component 'conv.x' is 6 here and 10"):
        pull(sink, source)


@pytest.mark.parametrize(
    "state",
    [
        facts("kda", (56, 3), (8, 4, 6)),
        facts("mamba2", (56, 3), (8, 4, 6), (8, 9, 4), (8, 9), (2, 9, 6)),
    ],
    ids=lambda state: state.mixer,
)
def test_states_of_a_mixer_that_is_not_known_are_opaque_pages(state: StateFacts) -> None:
    """Each of one rank alone, and named by everything that is known of it."""
    derived = derived_of(state, tp_size=4, tp_rank=3, vllm_version="0.33.0", device="NVIDIA H100 9.0")
    assert derived.opaque_layers == {state.mixer: 1}
    start = 0
    for number, (tensor, shape) in enumerate(zip(derived.layout.tensors, state.shapes, strict=True)):
        assert (tensor.component, tensor.units) == (f"page.{number}", (UnitRange(3, 4),))
        assert (tensor.offset - derived.layout.tensors[0].offset, tensor.chunk_bytes) == (
            start,
            prod(shape) * 2,
        )
        sizes = " x ".join(map(str, shape))
        assert tensor.encoding == (
            f"opaque: {state.mixer}, DS, state {number} of {sizes}, cache dtype auto, tp 4, "
            "vllm.Some, NVIDIA H100 9.0, vllm 0.33.0"
        )
        start += tensor.chunk_bytes
