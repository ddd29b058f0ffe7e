"""Messages between the bench and its processes: JSON lines on standard input and output."""

from __future__ import annotations

from typing import Any

import msgspec

from kvxferd.bench.cases import Case
from kvxferd.bench.shapes import BenchDeployment, Role
from kvxferd.ids import Rank
from kvxferd.tooling.line_protocol import CommandFailed, Line, LineProtocol


class ProcessMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory that another process of this machine can open: a process id and a file descriptor of it."""

    pid: int
    fd: int


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One moved request. Times are of the monotonic clock, in seconds."""

    began: float  # the request is known: its block ids
    built: float  # the timed part begins: `began`, or when the request that raw NIXL posts is built
    posted: float  # the call that starts it has returned
    ended: float  # the bytes are known to have arrived
    bytes: int
    runs: int


# --- to a rank of kvxferd


class StartRank(Line, frozen=True):
    """Allocate memory, connect, and register as this rank."""

    deployment: BenchDeployment
    role: Role
    rank: Rank
    worker_socket: str


class PublishCommand(Line, frozen=True):
    """Publish one transfer for each name; the n-th has the blocks of slot n modulo the number of slots."""

    case: Case
    names: list[str]


class OpenCommand(Line, frozen=True):
    """Publish a transfer of the first slot's blocks, of which none is written yet."""

    case: Case
    name: str


class ExtendCommand(Line, frozen=True):
    """Report an opened transfer in equal chunks, each `gap_s` after the one before, the first too."""

    case: Case
    name: str
    num_chunks: int
    gap_s: float


class AwaitRelease(Line, frozen=True):
    """Wait until these transfers are released."""

    names: list[str]


class PrepareCommand(Line, frozen=True):
    """Prepare the pulls of these references."""

    refs: list[dict[str, Any]]


class AbandonCommand(Line, frozen=True):
    """Abandon prepared references that will not be pulled."""

    refs: list[dict[str, Any]]


class PullCommand(Line, frozen=True):
    """Pull the references in order, at most `window` at a time.

    `progressive`: read what is ready meanwhile.
    """

    case: Case
    refs: list[dict[str, Any]]
    window: int = 1
    progressive: bool = False


class PullBehind(Line, frozen=True):
    """Start a large pull, and pull small ones, one after the other, until it ends."""

    large: Case
    large_ref: dict[str, Any]
    small: Case
    small_refs: list[dict[str, Any]]


class Stamp(Line, frozen=True):
    """Stamp the source of all slots of the case."""

    case: Case
    nonce: int


class Wipe(Line, frozen=True):
    """Write zeros over the destination of all slots of the case."""

    case: Case


class Check(Line, frozen=True):
    """Compare the content of the first slots: the ends of runs, or every word."""

    case: Case
    nonce: int
    slots: int
    whole: bool = False


# --- to a NIXL agent of its own


class AttachMemory(Line, frozen=True):
    """Register the memory of a rank in place of the previous one."""

    deployment: BenchDeployment
    memory: ProcessMemory


class AddRemote(Line, frozen=True):
    """Load the source agent's metadata, and the address of its memory."""

    metadata: str  # base64
    address: int


class Move(Line, frozen=True):
    """Move `count` requests of the case, at most `window` at a time."""

    case: Case
    count: int
    window: int = 1


class SetManualPolling(Line, frozen=True):
    """Poll by hand while `on`, so that others can read from this process."""

    on: bool


# --- replies


class CommandDone(Line, frozen=True):
    """The command is done."""


class RankStarted(Line, frozen=True):
    """The rank is registered, with this memory."""

    memory: ProcessMemory
    register_s: float


class Published(Line, frozen=True):
    """The references, in the order of the names."""

    refs: list[dict[str, Any]]


class Extended(Line, frozen=True):
    """The chunks are reported."""

    last_at: float  # when the last was reported, of the monotonic clock, in seconds


class Moved(Line, frozen=True):
    """One sample for each request, in the order of the command; a large one comes first."""

    samples: list[Sample]


class Checked(Line, frozen=True):
    """The number of wrong words."""

    wrong: int


class MemoryAttached(Line, frozen=True):
    """The memory is registered; the fields are what a reader needs."""

    metadata: str  # base64
    address: int


RankCommand = (
    StartRank
    | PublishCommand
    | OpenCommand
    | ExtendCommand
    | AwaitRelease
    | PrepareCommand
    | AbandonCommand
    | PullCommand
    | PullBehind
    | Stamp
    | Wipe
    | Check
)
BaselineCommand = AttachMemory | AddRemote | Move | SetManualPolling
Command = RankCommand | BaselineCommand
Reply = CommandDone | RankStarted | Published | Extended | Moved | Checked | MemoryAttached | CommandFailed

PROTOCOL: LineProtocol[Command, Reply] = LineProtocol(Command, Reply)
