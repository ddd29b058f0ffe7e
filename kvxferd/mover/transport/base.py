"""The contract of a transport: what a mover needs from a transfer library, and what it may rely on.

`NixlTransport` keeps it, and so does a transport of the tests; both pass one suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvxferd.errors import MoverError
from kvxferd.ids import AgentName
from kvxferd.plan import Runs


class MemoryRange(NamedTuple):
    """A range of this process's memory that is registered as one."""

    address: int
    size_bytes: int
    mem_type: str = "DRAM"
    device: int = 0


class MemoryKind(NamedTuple):
    """The kind of memory that addresses lie in, as one side names it."""

    mem_type: str = "DRAM"
    device: int = 0
    staged: bool = False  # the library cannot reach it


class ReadKinds(NamedTuple):
    """The kinds of memory that reads land in and come from."""

    local: MemoryKind = MemoryKind()
    remote: MemoryKind = MemoryKind()


HOST = ReadKinds()


class TransportError(MoverError):
    """A library call failed.

    `settled`: nothing that the failed call or handle posted can still write; of a lost connection the
    transports used decide that (`kvxferd.mover.disconnects`). `lost`: the connection to the agent is dead;
    every post to it fails until it is dropped and loaded again.
    """

    def __init__(self, message: str, *, settled: bool, lost: bool = False) -> None:
        super().__init__(message)
        self.settled = settled
        self.lost = lost


def check_agent_name(name: AgentName | None, wanted: AgentName | None) -> None:
    """Raise TransportError where metadata names another agent than the wanted one."""
    if name is not None and wanted is not None and name != wanted:
        raise TransportError(f"cannot load agent {wanted}: its metadata is that of {name[:80]}", settled=True)


class ReadHandle(Protocol):
    """One posted read. It is terminal once `done`, or once `poll` has raised."""

    @property
    def done(self) -> bool:
        """Whether all bytes are here."""
        ...


class Transport(Protocol):
    """One agent. One thread calls all methods, and none blocks for longer than one copy."""

    @property
    def agent(self) -> AgentName:
        """The agent's name, which its metadata carries."""
        ...

    @property
    def library(self) -> str:
        """Return the library's name and version, for people."""
        ...

    def register(self, span: MemoryRange) -> None:
        """Make memory readable by others and usable as a destination. Raises TransportError."""
        ...

    def deregister(self, span: MemoryRange) -> None:
        """Undo `register`. Reads of the memory must have ended."""
        ...

    def metadata(self, spans: Sequence[MemoryRange]) -> bytes:
        """Return what a reader loads to read these spans, how to connect included.

        A reader that has loaded the agent already may load it again, to read more spans.
        """
        ...

    def load_remote(self, metadata: bytes, agent: AgentName | None = None) -> AgentName:
        """Load an agent, or more of its memory; return its name. Raises TransportError.

        `agent`: whose metadata it must be. Another's is not loaded, because metadata that fails to load
        spoils the agent that it names.
        """
        ...

    def drop_remote(self, agent: AgentName) -> None:
        """Unload an agent; reads from it must have ended. Does nothing where the agent is not loaded."""
        ...

    def post(self, agent: AgentName, runs: Runs, kinds: ReadKinds = HOST) -> ReadHandle:
        """Start to read these runs, which are of one kind; the handle may be done at once.

        An agent reads its own memory under its own name, without loading it.

        Raises TransportError: with `settled` where an agent or an address is unknown, before
        anything moves.
        """
        ...

    def poll(self, handle: ReadHandle) -> bool:
        """Advance the read, and return whether it is done. Raises TransportError, once."""
        ...

    def release(self, handle: ReadHandle) -> None:
        """Release a terminal handle."""
        ...

    def progress(self) -> None:
        """Serve peers' reads. A source that does not call this stalls them."""
        ...

    def notify(self, agent: AgentName, payload: bytes) -> None:
        """Send a notification to a loaded agent. Raises TransportError; a sent one may still be lost."""
        ...

    def receive_notifications(self) -> list[tuple[AgentName, bytes]]:
        """Return the notifications that have arrived, each with its sender, after serving peers' reads."""
        ...

    def close(self) -> None:
        """End the agent. Idempotent."""
        ...
