"""What single messages cost: `python benchmarks/message_costs.py`. Prints the least CPU time of some rounds.

A publish of 512 block ids that names the incarnations of 0, 1, 8 and 64 ranks; the check of the largest
layout that one registration may have; four million block ids looked through for repeats.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from kvxferd.ids import GroupName, Incarnation, Rank, TransferId
from kvxferd.layout import EngineSpec, PackedBlocks, pack_ids
from kvxferd.layout.presets import attention_layout
from kvxferd.layout.validate import MAX_TENSORS, validate_layout
from kvxferd.plan.block_list_checks import duplicate_id
from kvxferd.wire.codec import CLIENT_MESSAGES, encode
from kvxferd.wire.limits import MAX_REQUEST_IDS_BYTES
from kvxferd.wire.worker import Publish


def least_us(act: Callable[[], object], count: int) -> float:
    """Return the shortest time of one call of `act`, over rounds of `count` calls."""
    least = float("inf")
    for _ in range(7):
        began = time.process_time()
        for _ in range(count):
            act()
        least = min(least, (time.process_time() - began) / count)
    return 1e6 * least


def publish_of(num_ranks: int) -> Publish:
    """Return a publish that names the incarnations of `num_ranks` ranks."""
    named = tuple((Rank(0, tp), Incarnation(f"{tp:016x}")) for tp in range(num_ranks))
    return Publish(
        transfer_id=TransferId("cmpl-0123456789abcdef"),
        nonce="0" * 32,
        blocks={GroupName("full"): PackedBlocks(pack_ids(range(512)))},
        num_tokens=8192,
        fence_slot=0,
        incarnations=named,
    )


def main() -> None:
    """Measure and print."""
    for num_ranks in (0, 1, 8, 64):
        publish = publish_of(num_ranks)
        payload = encode(publish)
        encoding = least_us(partial(encode, publish), 2000)
        decoding = least_us(partial(CLIENT_MESSAGES.decode, payload), 2000)
        print(
            f"publish, {num_ranks:2} ranks named: {len(payload)} bytes, {encoding:.1f} us to encode, "
            f"{decoding:.1f} us to decode"
        )
    spec = EngineSpec("e", "g", num_layers=MAX_TENSORS // 2, num_kv_heads=2)
    layout = attention_layout(
        spec=spec, num_kv_heads=2, head_dim=128, block_tokens=16, num_blocks=4, layout="HND"
    )
    took = least_us(lambda: validate_layout(spec, layout), 1)
    print(f"layout of {len(layout.tensors)} tensors: {took / 1000:.0f} ms to check")
    ids = np.random.default_rng(0).permutation(MAX_REQUEST_IDS_BYTES // 4).astype(np.int32)
    listed = PackedBlocks(ids.tobytes())
    print(
        f"{len(ids)} block ids: {least_us(lambda: duplicate_id(listed), 1) / 1000:.0f} ms to look for repeats"
    )


if __name__ == "__main__":
    main()
