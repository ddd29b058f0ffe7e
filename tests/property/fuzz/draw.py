"""Choices made from bytes, so that one target serves hypothesis and coverage-guided fuzzing alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

ODD_INTS = [
    -(2**63),
    -(2**31),
    -1,
    0,
    1,
    2,
    3,
    7,
    255,
    2**16,
    2**21,
    2**31 - 1,
    2**32,
    2**48,
    2**63 - 1,
    2**64 - 1,
]
ODD_FLOATS = [float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 5e-324, 1e-9, 0.5, 1e9, 1.7e308]
ODD_STRINGS = ["", "x", "\x00", "é" * 300, "tcp://0:0", "ipc:///tmp/x", "{0}", "../..", "\ud7ff", "y" * 5000]
ODD_BYTES = [b"", b"\x00", b"\xff" * 4, bytes(16), b"\x00\x00\x00\x80", bytes(4096)]
ODD = [None, True, [], {}, *ODD_INTS[:4], *ODD_FLOATS[:2], *ODD_STRINGS[:2], b""]


class Draw:
    """A front of bytes that shrinks with every choice; zeros follow for ever."""

    def __init__(self, source: bytes) -> None:
        self._source = source
        self._at = 0

    @property
    def is_over(self) -> bool:
        """Whether every byte has been used."""
        return self._at >= len(self._source)

    def byte(self) -> int:
        """The next byte."""
        self._at += 1
        return self._source[self._at - 1] if self._at <= len(self._source) else 0

    def below(self, limit: int) -> int:
        """A number from 0 to `limit` - 1; two bytes where one does not reach."""
        number = self.byte()
        return (number if limit <= 256 else number << 8 | self.byte()) % limit

    def pick(self, values: Sequence[T]) -> T:
        """One of the values."""
        return values[self.below(len(values))]

    def take(self, limit: int) -> bytes:
        """At most `limit` bytes as they are."""
        taken = self._source[self._at : self._at + limit]
        self._at += limit
        return taken

    def odd(self, value: Any) -> Any:
        """Something else, mostly of the value's type."""
        pools: list[tuple[type, list[Any]]] = [
            (bool, [True, False]),
            (int, [*ODD_INTS, *_near(value)] if isinstance(value, int) else ODD_INTS),
            (float, ODD_FLOATS),
            (str, ODD_STRINGS),
            (bytes, ODD_BYTES),
        ]
        if self.below(8) == 0:
            return self.pick(ODD)
        for kind, pool in pools:
            if isinstance(value, kind):
                return self.pick(pool)
        if isinstance(value, list):
            return self.pick([[], value[:1], value + value, value[::-1]])
        if isinstance(value, dict):
            return {} if self.below(2) else {key: part for key, part in value.items() if self.below(4)}
        return self.pick(ODD)

    def mutated(self, tree: Any) -> Any:
        """The tree with one place changed: found by walking down from the top."""
        if isinstance(tree, dict) and tree and self.below(8):
            key = self.pick(list(tree))
            return {**tree, key: self.mutated(tree[key])}
        if isinstance(tree, list) and tree and self.below(8):
            at = self.below(len(tree))
            return [*tree[:at], self.mutated(tree[at]), *tree[at + 1 :]]
        return self.odd(tree)


def _near(value: int) -> list[int]:
    """Numbers like that one, as far as msgpack has them."""
    return [min(max(-(2**63), near), 2**64 - 1) for near in (value + 1, value - 1, value * 2)]
