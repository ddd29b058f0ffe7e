"""What SGLang gives back while it may still be read: kept until it may not.

An abort of SGLang's frees a request's pages at once, in its waiting queue, between chunks, and behind a
forward pass. Published pages may be read until `Released`. So what would free them is kept here, in the order
in which it came, which is the same on every rank of a stage; the ranks let go of a request together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class _Held(NamedTuple):
    is_released: Callable[[], bool]
    give_back: dict[str, Callable[[], object]]  # by what it is


class HeldRequests:
    """The requests whose pages and rows are given back later. Used by one thread."""

    def __init__(self, agree: Callable[[list[bool]], Sequence[bool]]) -> None:
        """`agree` returns for each request whether all ranks have it released. Every rank calls it alike."""
        self._agree = agree
        self._held: dict[int, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(
        self, request: object, kind: str, give_back: Callable[[], object], is_released: Callable[[], bool]
    ) -> None:
        """Call `give_back` once every rank has the request released.

        It keeps the request alive. SGLang may give back one kind of a request's resources twice, because it
        still has them: the first call counts.
        """
        held = self._held.setdefault(id(request), _Held(is_released, {}))
        held.give_back.setdefault(kind, give_back)

    def give_back(self) -> None:
        """Give back what all ranks have released. It waits for the other ranks where something is held."""
        if not self._held:
            return
        agreed = self._agree([held.is_released() for held in self._held.values()])
        for (request, held), is_released in zip(list(self._held.items()), agreed, strict=True):
            if is_released:
                del self._held[request]
                for call in held.give_back.values():
                    call()
