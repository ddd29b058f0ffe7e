"""The convolution state of a hybrid as in-engine connectors describe it: three parts per page, the "3-read".

The planner needs none of this: conv.x, conv.B and conv.C are components like any other. In-engine
connectors print these numbers, and their users compare them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

OffsetAndSize = tuple[int, int]  # bytes


@dataclasses.dataclass(frozen=True)
class MambaConvSplitInfo:
    """The parts of one rank's convolution state, in memory order (DS: channel by channel).

    Mamba2: x, B, C. Gated delta nets: Q, K, V.
    """

    conv_rows: int  # the kernel's width less one, and more with speculative tokens
    local_proj_dims: tuple[int, int, int]  # columns per part on this rank
    conv_dtype_size: int  # bytes
    ssm_sizes: tuple[int, int]  # bytes of the convolution state, and of the recurrent state behind it

    @property
    def proj_bytes(self) -> tuple[int, int, int]:
        """Return the bytes of each part."""
        first, second, third = (
            width * self.conv_rows * self.conv_dtype_size for width in self.local_proj_dims
        )
        return first, second, third

    @property
    def local_conv_offsets(self) -> list[OffsetAndSize]:
        """Return the offset and size of each part in this rank's own page."""
        return _consecutive_parts(self.proj_bytes)

    def remote_conv_offsets(self, local_rank_offset: int, tp_ratio: int) -> list[OffsetAndSize]:
        """Return the offset and size of each part that this rank reads of one remote page.

        `tp_ratio` is local over remote TP: this rank reads its share, the `local_rank_offset`-th
        of `tp_ratio`. Where the remote is wider it is minus remote over local, and the remote
        rank's page is read whole, at that rank's own offsets. Raises ValueError where the parts
        do not divide by it.
        """
        if tp_ratio >= 1:
            if not 0 <= local_rank_offset < tp_ratio:
                raise ValueError(f"cannot take share {local_rank_offset} of {tp_ratio}")
            whole = _consecutive_parts([size * tp_ratio for size in self.proj_bytes])
            return [
                (start + local_rank_offset * size, size)
                for (start, _), size in zip(whole, self.proj_bytes, strict=True)
            ]
        ranks = -tp_ratio
        if ranks < 1 or any(width % ranks for width in self.local_proj_dims):
            raise ValueError(f"cannot divide parts of {self.local_proj_dims} columns by {ranks} remote ranks")
        return _consecutive_parts([size // ranks for size in self.proj_bytes])


def derive_mamba_conv_split(
    conv_shape: Sequence[int],
    ssm_shape: Sequence[int],
    *,
    conv_dtype_size: int = 2,
    ssm_dtype_size: int = 2,
    is_gdn: bool = False,
) -> MambaConvSplitInfo:
    """Return the parts of a convolution state from one rank's shapes.

    `conv_shape` is (columns, rows), `ssm_shape` (heads, head_dim, ...), both of one rank. The columns
    beside x (GDN: V) are B and C (Q and K) in equal halves; there may be none.
    Raises ValueError where the columns are fewer than x, or the rest is odd.
    """
    columns, rows = conv_shape
    own = ssm_shape[0] * ssm_shape[1]
    rest = columns - own
    if rest < 0 or rest % 2:
        raise ValueError(
            f"cannot split {columns} convolution columns: {ssm_shape[0]} heads of {ssm_shape[1]} take {own}, "
            f"and {rest} are no two equal parts"
        )
    half = rest // 2
    return MambaConvSplitInfo(
        conv_rows=rows,
        local_proj_dims=(half, half, own) if is_gdn else (own, half, half),
        conv_dtype_size=conv_dtype_size,
        ssm_sizes=(columns * rows * conv_dtype_size, math.prod(ssm_shape) * ssm_dtype_size),
    )


def compute_physical_blocks_per_logical(ssm_sizes: Sequence[int], block_len: int) -> int:
    """Return how many kernel blocks of `block_len` bytes hold a request's states, rounded up."""
    if block_len < 1:
        raise ValueError(f"cannot divide states of {sum(ssm_sizes)} bytes into blocks of {block_len}")
    return -(-sum(ssm_sizes) // block_len)


def logical_to_remote_block_ids(
    ids: Sequence[Sequence[int]], is_state_group: Sequence[bool], remote_physical_blocks_per_logical: int
) -> list[list[int]]:
    """Return each group's ids as the remote's kernel blocks.

    The remote's own ratio alone decides. The ids of a state group never expand.
    """
    ratio = remote_physical_blocks_per_logical
    return [
        list(group) if is_state else [block * ratio + inside for block in group for inside in range(ratio)]
        for group, is_state in zip(ids, is_state_group, strict=True)
    ]


def _consecutive_parts(sizes: Sequence[int]) -> list[OffsetAndSize]:
    """Return parts of these sizes, each beginning where the one before it ends."""
    placed = []
    start = 0
    for size in sizes:
        placed.append((start, size))
        start += size
    return placed
