"""The convolution state of a hybrid: three parts of one array, the "3-read" of in-engine connectors.

Mamba2 has x, B and C; gated delta nets Q, K and V, where V is x, and Q and K are B and C; Mamba1 x alone.
Each part is divided over the ranks by itself, so it is a component of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvxferd.ids import GroupName, RegionId
from kvxferd.layout.tensors import CacheTensor, UnitRange, num_units

OffsetAndSize = tuple[int, int]  # bytes


class ConvPart(NamedTuple):
    """A part of the convolution's columns on one rank. A unit is a column, whatever they are columns of."""

    component: str
    units: tuple[UnitRange, ...]  # global

    @property
    def num_columns(self) -> int:
        """Return the columns that the rank holds."""
        return num_units(self.units)


@dataclasses.dataclass(frozen=True)
class MambaConvSplitInfo:
    """One rank's convolution state: its parts, in memory order, and how rows and columns lie.

    A column's rows are contiguous (DS, `is_dim_first`), or a whole row apart (SD), so either can be read
    from the other.
    """

    parts: tuple[ConvPart, ...]
    conv_rows: int  # the kernel's width less one, and more with speculative tokens
    conv_dtype_size: int  # bytes
    is_dim_first: bool = True

    @property
    def conv_dim_local(self) -> int:
        """Return the columns of all parts on this rank."""
        return sum(part.num_columns for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all parts on this rank."""
        return self.conv_dim_local * self.conv_rows * self.conv_dtype_size

    @property
    def local_conv_offsets(self) -> list[OffsetAndSize]:
        """Return where each part begins in this rank's state, and the bytes of it in a row there.

        Those are the whole part (DS), or its columns of one row (SD).
        """
        of_column = self.conv_dtype_size * (self.conv_rows if self.is_dim_first else 1)
        sizes = [part.num_columns * of_column for part in self.parts]
        return list(zip(itertools.accumulate(sizes[:-1], initial=0), sizes, strict=True)) if sizes else []

    def tensors(
        self, layer: int, group: GroupName, region: RegionId, offset: int, block_stride: int, dtype: str
    ) -> Iterator[CacheTensor]:
        """Yield the cache tensor of each part. `offset`: of the state in block 0, from the region's start."""
        row_bytes = self.conv_dim_local * self.conv_dtype_size
        content = self.conv_dtype_size * (self.conv_rows if self.is_dim_first else 1)
        for part, (start, _) in zip(self.parts, self.local_conv_offsets, strict=True):
            yield CacheTensor(
                layer=layer,
                component=part.component,
                group=group,
                region=region,
                offset=offset + start,
                block_stride=block_stride,
                token_stride=0,
                unit_stride=content,
                units=part.units,
                chunk_bytes=content,
                num_chunks=1 if self.is_dim_first else self.conv_rows,
                chunk_stride=0 if self.is_dim_first else row_bytes,
                itemsize=self.conv_dtype_size,
                dtype=dtype,
            )


def derive_mamba_conv_split(columns: int, ssm_shape: Sequence[int]) -> tuple[int, int]:
    """Return the columns of x (or V), and of B and of C each (or Q and K), from one rank's shapes.

    `ssm_shape` is (heads, head_dim, ...), or (channels, state_size) of Mamba1. The columns beside x are two
    equal halves; there may be none. Raises ValueError where the columns are fewer than x, or the rest is odd.
    """
    heads, width = ssm_shape[0], 1 if len(ssm_shape) == 2 else ssm_shape[1]
    rest = columns - heads * width
    if rest < 0 or rest % 2:
        raise ValueError(
            f"cannot split {columns} convolution columns: {heads} heads of {width} take {heads * width}, "
            f"and {rest} are no two equal parts"
        )
    return heads * width, rest // 2


def compute_physical_blocks_per_logical(ssm_sizes: Sequence[int], block_len: int) -> int:
    """Return how many kernel blocks of `block_len` bytes hold a request's states, rounded up.

    `ssm_sizes` are the bytes of the states' parts. An engine's own ratio is no smaller; it is larger where
    the engine rounds its blocks up to more.
    """
    if block_len < 1:
        raise ValueError(f"cannot divide states of {sum(ssm_sizes)} bytes into blocks of {block_len}")
    return -(-sum(ssm_sizes) // block_len)
