"""What a mover needs from a transfer library, and what it may rely on.

Two implementations keep this contract and pass one suite: `NixlTransport` and `MemoryTransport`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvxferd.errors import MoverError
from kvxferd.ids import AgentName
from kvxferd.plan import Runs


class Span(NamedTuple):
    """One stretch of this process's memory, as it is registered."""

    address: int
    size_bytes: int
    mem_type: str = "DRAM"
    device: int = 0


class MemoryKind(NamedTuple):
    """What kind of memory addresses are in, as one side names it."""

    mem_type: str = "DRAM"
    device: int = 0
    staged: bool = False  # the library cannot reach it


class ReadKinds(NamedTuple):
    """Where reads land and where they come from."""

    local: MemoryKind = MemoryKind()
    remote: MemoryKind = MemoryKind()


HOST = ReadKinds()


class TransportError(MoverError):
    """A library call failed.

    `settled`: nothing that the failed call or handle posted can still write. `lost`: the connection
    to the agent is dead; every post to it fails until it is dropped and loaded again. Lost and not
    settled: whether something can still write depends on the transports (`disconnects`).
    """

    def __init__(self, message: str, *, settled: bool, lost: bool = False) -> None:
        super().__init__(message)
        self.settled = settled
        self.lost = lost


def check_agent_name(name: AgentName | None, wanted: AgentName | None) -> None:
    """Raise TransportError where metadata names another agent than the one that it is said to be of."""
    if name is not None and wanted is not None and name != wanted:
        raise TransportError(f"cannot load agent {wanted}: its metadata is that of {name[:80]}", settled=True)


class ReadHandle(Protocol):
    """One posted read. Terminal once `done`, or once `poll` has raised."""

    @property
    def done(self) -> bool:
        """All bytes are here."""
        ...


class Transport(Protocol):
    """One agent: one thread calls everything, and nothing here blocks longer than one copy."""

    @property
    def agent(self) -> AgentName:
        """The agent's name, which its metadata carries."""
        ...

    @property
    def library(self) -> str:
        """Name and version, for people."""
        ...

    def register(self, span: Span) -> None:
        """Make memory readable by others and usable as a destination. Raises TransportError."""
        ...

    def deregister(self, span: Span) -> None:
        """Undo `register`. Reads of it that are under way must have ended."""
        ...

    def metadata(self, spans: Sequence[Span]) -> bytes:
        """Return what a reader loads to read these spans, how to connect included.

        A reader that has loaded the agent already may load it again: it gets to know more spans.
        """
        ...

    def load_remote(self, metadata: bytes, agent: AgentName | None = None) -> AgentName:
        """Get to know an agent, or more of its memory. Raises TransportError.

        `agent`: whose it must be. Another's is not loaded: what fails to load spoils the agent that it names.
        """
        ...

    def drop_remote(self, agent: AgentName) -> None:
        """Forget an agent; reads from it must have ended. An agent that is not loaded is no error."""
        ...

    def post(self, agent: AgentName, runs: Runs, kinds: ReadKinds = HOST) -> ReadHandle:
        """Start to read these stretches, which are of one kind; the handle may be done at once.

        An agent reads its own memory under its own name, without loading it.

        Raises TransportError: with `settled` where an agent or an address is unknown, before
        anything moves.
        """
        ...

    def poll(self, handle: ReadHandle) -> bool:
        """Return whether the read is done, after moving it on. Raises TransportError, once."""
        ...

    def release(self, handle: ReadHandle) -> None:
        """Give a terminal handle back."""
        ...

    def progress(self) -> None:
        """Serve others' reads. A source that does not call this stalls them."""
        ...

    def notify(self, agent: AgentName, payload: bytes) -> None:
        """Tell a loaded agent something. Raises TransportError; what is told may still be lost."""
        ...

    def receive_notifications(self) -> list[tuple[AgentName, bytes]]:
        """Return what other agents have told this one, after serving their reads."""
        ...

    def close(self) -> None:
        """End the agent. Idempotent."""
        ...
