"""Requests that wait for work on a GPU: they are sent to the daemon once their event is done."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvxferd.errors import Code, EngineError

# Seconds between queries of an event: a request waits half of it on average, and a query costs a microsecond.
POLL_S = 0.0005


class Completion(Protocol):
    """Work that was launched: a recorded `torch.cuda.Event`, or any object with such a `query`."""

    def query(self) -> bool:
        """Return whether the work is done; never waits. Called from any thread."""


def unfinished(after: Completion | None) -> Completion | None:
    """Return `after`, or None where its work is done. Raises what `query` raises: the engine's own failure.

    Raises EngineError(bad-request) for an object without `query`, and for an event of torch's that was
    never recorded: its `query` returns True.
    """
    if after is None:
        return None
    if not callable(getattr(after, "query", None)):
        raise EngineError(
            f"cannot wait for {type(after).__name__}: it has no query(); give a recorded event",
            Code.BAD_REQUEST,
        )
    if getattr(after, "cuda_event", None) == 0:
        raise EngineError(
            "cannot wait for an event that was never recorded: record it behind the last kernel",
            Code.BAD_REQUEST,
        )
    return None if after.query() else after


@dataclass(frozen=True, slots=True)
class _Pending:
    after: Completion
    on_done: Callable[[], None]
    on_error: Callable[[str], None]


class PendingCompletions:
    """The requests that wait, in the order of the calls. The caller holds the session's lock."""

    def __init__(self) -> None:
        self._pending: list[_Pending] = []
        self.next_poll = math.inf  # when `poll` is due next; infinity: nothing waits

    def add(self, after: Completion, on_done: Callable[[], None], on_error: Callable[[str], None]) -> None:
        """Call `on_done` once the work is done, or `on_error` with the reason if it fails."""
        self._pending.append(_Pending(after, on_done, on_error))
        self.next_poll = 0.0

    def poll(self, now: float) -> None:
        """Query each completion and call back for those that are done or have failed."""
        if now < self.next_poll:
            return
        waiting, self._pending = self._pending, []
        for pending in waiting:
            try:
                is_done = pending.after.query()
            except Exception as error:  # of a failed kernel: any type
                pending.on_error(f"the work that it waits for failed: {error!r}")
                continue
            if is_done:
                pending.on_done()
            else:
                self._pending.append(pending)
        self.next_poll = now + POLL_S if self._pending else math.inf
