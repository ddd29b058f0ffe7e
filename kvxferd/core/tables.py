"""Counters and indexes without empty entries: what has gone leaves nothing behind."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


def decrease(counter: Counter[K], key: K, amount: int = 1) -> None:
    """Subtract from a counter's entry. An entry that is 0 is removed."""
    counter[key] -= amount
    if not counter[key]:
        del counter[key]


def discard(index: dict[K, dict[V, Any]], key: K, value: V) -> None:
    """Remove a value from an index. A key without values is removed."""
    values = index[key]
    del values[value]
    if not values:
        del index[key]
