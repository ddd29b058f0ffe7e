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

    Mamba2: x, B, C. Gated delta nets: Q, K, V, where V is x, and Q and K are B and C. Mamba1: x alone.
    """

    conv_rows: int  # the kernel's width less one, and more with speculative tokens
    x_local: int  # columns of x, or of V, on this rank
    b_local: int  # columns of B and of C each, or of Q and of K
    conv_dtype_size: int  # bytes
    ssm_sizes: tuple[int, int]  # bytes of the convolution state, and of the recurrent state behind it
    is_gdn: bool = False  # V lies last; else x lies first

    @property
    def conv_dim_local(self) -> int:
        """Return the columns of all parts on this rank."""
        return self.x_local + 2 * self.b_local

    @property
    def x_bytes(self) -> int:
        """Return the bytes of x, or of V, on this rank."""
        return self.x_local * self.conv_rows * self.conv_dtype_size

    @property
    def b_bytes(self) -> int:
        """Return the bytes of B and of C each, or of Q and of K."""
        return self.b_local * self.conv_rows * self.conv_dtype_size

    @property
    def local_conv_offsets(self) -> list[OffsetAndSize]:
        """Return the offset and size of each part in this rank's own page."""
        return _consecutive_parts(self._part_bytes)

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
            whole = _consecutive_parts([size * tp_ratio for size in self._part_bytes])
            return [
                (start + local_rank_offset * size, size)
                for (start, _), size in zip(whole, self._part_bytes, strict=True)
            ]
        ranks = -tp_ratio
        if ranks < 1 or self.x_local % ranks or self.b_local % ranks:
            raise ValueError(
                f"cannot divide parts of {self.x_local} and {self.b_local} columns by {ranks} remote ranks"
            )
        return _consecutive_parts([size // ranks for size in self._part_bytes])

    @property
    def _part_bytes(self) -> tuple[int, int, int]:
        x, b = self.x_bytes, self.b_bytes
        return (b, b, x) if self.is_gdn else (x, b, b)


def derive_mamba_conv_split(
    conv_shape: Sequence[int],
    ssm_shape: Sequence[int],
    *,
    conv_dtype_size: int = 2,
    ssm_dtype_size: int = 2,
    is_gdn: bool = False,
) -> MambaConvSplitInfo:
    """Return the parts of a convolution state from one rank's shapes.

    `conv_shape` is (columns, rows), `ssm_shape` (heads, head_dim, ...), or (channels, state_size) of
    Mamba1, both of one rank. The columns beside x (GDN: V) are B and C (Q and K) in equal halves; there
    may be none. Raises ValueError where the columns are fewer than x, or the rest is odd.
    """
    columns, rows = conv_shape
    heads, width = ssm_shape[0], 1 if len(ssm_shape) == 2 else ssm_shape[1]
    rest = columns - heads * width
    if rest < 0 or rest % 2:
        raise ValueError(
            f"cannot split {columns} convolution columns: {heads} heads of {width} take {heads * width}, "
            f"and {rest} are no two equal parts"
        )
    return MambaConvSplitInfo(
        conv_rows=rows,
        x_local=heads * width,
        b_local=rest // 2,
        conv_dtype_size=conv_dtype_size,
        ssm_sizes=(columns * rows * conv_dtype_size, math.prod(ssm_shape) * ssm_dtype_size),
        is_gdn=is_gdn,
    )


def compute_physical_blocks_per_logical(ssm_sizes: Sequence[int], block_len: int) -> int:
    """Return how many kernel blocks of `block_len` bytes hold a request's states, rounded up.

    An engine's own ratio is no smaller; it is larger where the engine rounds its blocks up to more.
    """
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
