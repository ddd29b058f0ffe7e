"""Which process runs a rank's mover: the first placement that works, and why those before did not.

child: a process of the daemon, which maps the memory. It must be made to be shared, or be adopted.
resident: a thread of this process, which needs the transfer library here. Any memory will do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvxferd.errors import Code, EngineError, KvxferdError

# What a placement means for the engine, as a sentence of the log. `exported` is a child's GPU memory.
_OF_CHILD = (
    "Its mover is a process of the daemon: a crash in it leaves this engine alone, and it can be killed"
)
MEANINGS = {
    "child": _OF_CHILD,
    "exported": _OF_CHILD,
    "resident": (
        "Its mover is a thread of this worker: a crash in it ends this engine, and it cannot be killed"
    ),
}

# Codes that concern the placement alone, so that another may work.
_OF_PLACEMENT = frozenset(
    {
        Code.DEVICE_UNAVAILABLE,
        Code.DEVICE_ERROR,
        Code.REGION_NOT_EXPORTABLE,
        Code.NIXL_UNAVAILABLE,
        Code.MOVER_LOST,
    }
)
# What killed a mover outside would end the engine if it ran inside.
_NOT_TRIED_AFTER = frozenset({Code.MOVER_LOST})
_UNTRIED = "not tried after that: what ended a mover outside would end this engine inside"


class PlacementSearch:
    """The placements of one rank that are left to try, and why those before did not work."""

    def __init__(
        self,
        rank: str,
        placements: Sequence[str],
        explain: Callable[[KvxferdError], str],
        *,
        memory: str = "memory",
        insist: str,
    ) -> None:
        """Set the placements, keys of `MEANINGS`, in the order in which they are tried.

        `rank`, `memory`: their names in messages. `explain` returns why a placement does not work, and what
        mends it. `insist`: how to have one tried that a mover's death has ruled out.
        """
        self._rank, self._memory = rank, memory
        self._left = list(placements)
        self._explain = explain
        self._insist = insist
        self._failures: list[tuple[str, str]] = []

    @property
    def current(self) -> str:
        """The placement to try now."""
        return self._left[0]

    def fail(self, error: KvxferdError) -> None:
        """Go on to the next placement. Raises the error itself where no other would change it.

        Raises EngineError, with the error's code and all reasons, after the last placement.
        """
        if error.code not in _OF_PLACEMENT:
            raise error
        self._failures.append((self._left.pop(0), self._explain(error)))
        if error.code in _NOT_TRIED_AFTER:
            self._failures += [(placement, f"{_UNTRIED}; {self._insist}") for placement in self._left]
            self._left = []
        if not self._left:
            lines = [f"\n  {placement}: {failure}" for placement, failure in self._failures]
            refusal = f"cannot register {self._rank}: no placement of its {self._memory} works"
            raise EngineError(f"{refusal}{''.join(lines)}", error.code) from error

    def report(self) -> str:
        """Return the line of the log once `current` works."""
        before = "".join(f"; {placement} does not work: {failure}" for placement, failure in self._failures)
        return f"placement of {self._rank}: {self.current}. {MEANINGS[self.current]}{before}"
