"""Requests that wait for work on a GPU: they go to the daemon once their event is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvxferd.errors import Code, EngineError

# An event is asked for so often: a handover waits half of it on average, and each look costs a microsecond.
POLL_S = 0.0005


class Completion(Protocol):
    """Work that was launched: a recorded `torch.cuda.Event`, or whatever else can say when it is done."""

    def query(self) -> bool:
        """Whether the work is done; never waits. Called from any thread."""


def unfinished(after: Completion | None) -> Completion | None:
    """Return what is still to be waited for. Raises what `query` raises: the engine's own failure.

    Raises EngineError(bad-request) for what cannot be asked, and for an event of torch's that was never
    recorded: it calls itself done.
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
    """What waits, in the order asked. The caller holds the session's lock."""

    def __init__(self) -> None:
        self._pending: list[_Pending] = []
        self._next_poll: float | None = None

    def add(self, after: Completion, on_done: Callable[[], None], on_error: Callable[[str], None]) -> None:
        """Have `go` called once the work is done, or `fail` with the reason where it cannot be."""
        self._pending.append(_Pending(after, on_done, on_error))
        self._next_poll = 0.0

    def poll(self, now: float) -> None:
        """Let go what is done, each by itself."""
        if self._next_poll is None or now < self._next_poll:
            return
        waiting, self._pending = self._pending, []
        for pending in waiting:
            try:
                is_done = pending.after.query()
            except Exception as error:  # of a failed kernel, whatever it is
                pending.on_error(f"the work that it waits for failed: {error!r}")
                continue
            if is_done:
                pending.on_done()
            else:
                self._pending.append(pending)
        self._next_poll = now + POLL_S if self._pending else None

    def next_poll(self) -> float | None:
        """When `look` wants to be called."""
        return self._next_poll

    def clear(self) -> None:
        """Nobody will take any of it."""
        self._pending.clear()
        self._next_poll = None
