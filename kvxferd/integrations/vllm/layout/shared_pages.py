"""Check that a block id of attention has room for a state, where both lie in one of vLLM's allocations.

vLLM makes a logical block of attention of as many kernel blocks as a state needs room, and rounds up to
what its backends and `--block-size` ask for. So the ratio that is derived from the tensors is at least
the one that the states' size gives. A smaller one means that a tensor or a spec was read wrongly.
"""

from __future__ import annotations

from typing import NamedTuple

from kvxferd.ids import RegionId
from kvxferd.integrations.vllm.layout.facts import LayerFacts, StateFacts, layer_error
from kvxferd.layout import compute_physical_blocks_per_logical
from kvxferd.layout.tensor_views import TensorView


class _AttentionBlocks(NamedTuple):
    """The attention in one allocation."""

    num_bytes: int  # from one kernel block to the next
    tokens: int  # of one kernel block
    per_id: int  # kernel blocks of one id


class SharedPages:
    """The attention and the states of each allocation of one rank."""

    def __init__(self) -> None:
        self._attention: dict[RegionId, _AttentionBlocks] = {}
        self._states: list[tuple[LayerFacts, tuple[int, ...], RegionId]] = []

    def add_attention(self, view: TensorView, block_tokens: int, per_id: int) -> None:
        """Add an attention layer's tensor, whose ids stand for `per_id` kernel blocks each."""
        blocks = _AttentionBlocks(view.strides[0], block_tokens, per_id)
        self._attention.setdefault(view.region, blocks)

    def add_state(self, layer: LayerFacts, state: StateFacts, region: RegionId) -> None:
        """Add a layer with states, whose page lies in `region`."""
        self._states.append((layer, state.part_bytes, region))

    def check(self) -> None:
        """Raise LayoutError for a layer whose states need more kernel blocks than an id stands for."""
        for layer, sizes, region in self._states:
            blocks = self._attention.get(region)
            if blocks is None:
                continue
            needed = compute_physical_blocks_per_logical(sizes, blocks.num_bytes)
            if blocks.per_id < needed:
                raise layer_error(
                    layer.name,
                    f"its states of {sum(sizes)} bytes take {needed} kernel blocks of {blocks.num_bytes} "
                    f"bytes, and a block id of the attention in the same memory stands for {blocks.per_id}; "
                    f"start the engine with --block-size {needed * blocks.tokens} or more",
                )
