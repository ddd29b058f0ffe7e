"""The facts of a model that a layout depends on: what each layer caches, its dtype, and what divides it."""

from __future__ import annotations

import dataclasses
from enum import StrEnum


class LayerKind(StrEnum):
    """The kind of cache that a layer has."""

    FULL = "full"  # every token
    SLIDING = "sliding"  # tokens inside the window; earlier ones are not needed again
    STATE = "state"  # one state per request (Mamba, GDN)
    NONE = "none"  # nothing (a layer of experts or of a plain MLP)


@dataclasses.dataclass(frozen=True)
class TokenComponent:
    """A component cached for every token: a key, a value, a latent, an indexer's key, a scale.

    Its name and encoding are those that vLLM's connector finds, so that the two read from each other.
    """

    name: str
    num_heads: int
    head_bytes: int
    dtype: str = "bfloat16"
    itemsize: int = 2
    is_replicated: bool = False  # every rank holds all of it, as an MLA latent
    granule_tokens: int = 1  # tokens that share one value
    encoding: str = ""


@dataclasses.dataclass(frozen=True)
class StateComponent:
    """A component cached once per request: a convolution's last inputs, a recurrent state.

    A unit's content is `rows` rows of `row_bytes` each. A convolution state may be stored row by row over
    all channels (SD), else (DS) a channel's rows are contiguous.
    """

    name: str
    num_units: int  # heads, groups or channels: what tensor parallelism divides
    row_bytes: int
    rows: int = 1
    dtype: str = "bfloat16"
    itemsize: int = 2
    is_convolution: bool = False
    is_replicated: bool = False  # every rank holds all of it, as the rows of an open group
    encoding: str = ""

    @property
    def unit_bytes(self) -> int:
        """Return the bytes of one unit's content."""
        return self.rows * self.row_bytes


@dataclasses.dataclass(frozen=True)
class SideCache:
    """A cache that some layers have beside that of their kind.

    Either one array of `components`, or `states`, once per request: a ring of the rows that are not
    compressed yet is one, of as many bytes as its rows have. Caches of one group have equal windows.
    """

    group: str
    layers: tuple[int, ...]
    components: tuple[TokenComponent, ...] = ()
    states: tuple[StateComponent, ...] = ()
    sliding_window: int | None = None  # tokens that one attends to, itself among them
    block_tokens: int = 0  # as the attention kernel requires; 0: the deployment's


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """The facts of a model that its cache depends on."""

    name: str
    num_kv_heads: int  # 0 where nothing is divided by heads
    kinds: tuple[LayerKind, ...]  # layer by layer
    # Components of one tuple share an array. Those of equal size are an axis of it (K and V); those of
    # unequal sizes lie one behind the other in each block.
    token_arrays: tuple[tuple[TokenComponent, ...], ...] = ()
    states: tuple[StateComponent, ...] = ()  # in the order in which they lie in a page
    sliding_window: int | None = None
    side_caches: tuple[SideCache, ...] = ()
    # Those of vLLM's layouts that its kernels take, first the one that an engine has unless told; none: any.
    layouts: tuple[str, ...] = ()

    @property
    def default_layout(self) -> str:
        """Return the layout of an engine that is told none."""
        return self.layouts[0] if self.layouts else "HND"

    def takes_layout(self, layout: str) -> bool:
        """Whether its kernels take a layout, which may have the suffix of convolution states."""
        return not self.layouts or layout.partition("+")[0] in self.layouts

    @property
    def caches(self) -> tuple[SideCache, ...]:
        """Return all caches, with those of the layers' kinds first."""
        found: list[SideCache] = []
        for kind in LayerKind:
            layers = tuple(layer for layer, own in enumerate(self.kinds) if own is kind)
            if kind is LayerKind.STATE and layers:
                found.append(SideCache("state.0", layers, states=self.states))
            elif kind is not LayerKind.NONE and layers:
                window = self.sliding_window if kind is LayerKind.SLIDING else None
                found += (SideCache(kind.value, layers, array, (), window) for array in self.token_arrays)
        return (*found, *self.side_caches)

    @property
    def num_layers(self) -> int:
        """Return the layers of the whole model, with those that cache nothing."""
        return len(self.kinds)


def key_and_value(
    num_heads: int, head_dim: int, dtype: str = "bfloat16", itemsize: int = 2, scale_bytes: int = 0
) -> tuple[tuple[TokenComponent, ...], ...]:
    """Return plain attention's cache; `scale_bytes` lie behind each head's content (quantised, inline)."""
    content = head_dim * itemsize + scale_bytes
    return (tuple(TokenComponent(name, num_heads, content, dtype, itemsize) for name in ("k", "v")),)


def row(
    name: str,
    num_bytes: int,
    granule_tokens: int = 1,
    dtype: str = "uint8",
    itemsize: int = 1,
    encoding: str = "",
) -> TokenComponent:
    """Return a component of one row for each granule, the same on every rank."""
    return TokenComponent(name, 1, num_bytes, dtype, itemsize, True, granule_tokens, encoding)


def ring(
    row_bytes: int, rows: int, dtype: str = "bfloat16", itemsize: int = 2, num_slots: int = 1
) -> StateComponent:
    """Return a ring of rows for each slot, the same on every rank."""
    return StateComponent(
        "ring", num_slots, row_bytes, rows, dtype, itemsize, is_replicated=True, encoding=f"ring of {rows}"
    )


def mamba2_states(
    num_heads: int,
    head_dim: int,
    num_groups: int,
    state_size: int,
    rows: int = 3,
    ssm_dtype: str = "bfloat16",
) -> tuple[StateComponent, ...]:
    """Return a Mamba2 layer's states: conv x by head, conv B and C by group, ssm by head."""
    ssm_item = 4 if ssm_dtype == "float32" else 2
    return (
        StateComponent("conv.x", num_heads, head_dim * 2, rows, is_convolution=True),
        StateComponent("conv.B", num_groups, state_size * 2, rows, is_convolution=True),
        StateComponent("conv.C", num_groups, state_size * 2, rows, is_convolution=True),
        StateComponent(
            "ssm", num_heads, head_dim * state_size * ssm_item, dtype=ssm_dtype, itemsize=ssm_item
        ),
    )


def mamba1_states(num_channels: int, state_size: int, rows: int = 3) -> tuple[StateComponent, ...]:
    """Return a Mamba1 layer's states: x only, by channel."""
    return (
        StateComponent("conv.x", num_channels, 2, rows, is_convolution=True),
        StateComponent("ssm", num_channels, state_size * 2),
    )


def gdn_states(
    num_key_heads: int, key_dim: int, num_value_heads: int, value_dim: int, rows: int = 3
) -> tuple[StateComponent, ...]:
    """Return a gated delta net's states: conv Q and K by key head, V by value head, and the state."""
    return (
        StateComponent("conv.Q", num_key_heads, key_dim * 2, rows, is_convolution=True),
        StateComponent("conv.K", num_key_heads, key_dim * 2, rows, is_convolution=True),
        StateComponent("conv.V", num_value_heads, value_dim * 2, rows, is_convolution=True),
        StateComponent("ssm", num_value_heads, value_dim * key_dim * 4, dtype="float32", itemsize=4),
    )
