"""What a move of one request took."""

from __future__ import annotations

import msgspec


class Sample(msgspec.Struct, frozen=True):
    """One moved request. Times are of the monotonic clock, in seconds."""

    began: float  # the request is known: its block ids
    built: float  # the timed part begins: `began`, or when the request that raw NIXL posts is built
    posted: float  # the call that starts it has returned
    ended: float  # the bytes are known to have arrived
    bytes: int
    runs: int
