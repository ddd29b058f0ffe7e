"""What the bench and its processes say to each other: JSON lines on standard input and output."""

from __future__ import annotations

from typing import Any

import msgspec

from kvxferd.bench.cases import Case
from kvxferd.bench.shapes import Deployment, Role
from kvxferd.ids import Rank


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t", kw_only=True):
    """Base of both directions."""


class ProcessMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory that another process of this machine can open: a descriptor of a process."""

    pid: int
    fd: int


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One request that was moved. Times are of the monotonic clock of the sink's machine, in seconds."""

    began: float  # the request is known: its block ids
    built: float  # from here on it counts: `began`, or when what raw NIXL posts is worked out
    posted: float  # the call that starts it has returned
    ended: float  # the bytes are known to be there
    bytes: int
    runs: int


# --- to a rank of kvxferd


class StartRank(Line, frozen=True, tag="begin"):
    """Be this rank: allocate, connect, register."""

    deployment: Deployment
    role: Role
    rank: Rank
    worker_socket: str


class PublishCommand(Line, frozen=True, tag="publish"):
    """Publish one transfer for each name; the n-th has the blocks of slot n modulo the case's slots."""

    case: Case
    names: list[str]


class AwaitRelease(Line, frozen=True, tag="await-release"):
    """Wait until these transfers are over."""

    names: list[str]


class PrepareCommand(Line, frozen=True, tag="prepare"):
    """Say that these will be pulled."""

    refs: list[dict[str, Any]]


class AbandonCommand(Line, frozen=True, tag="abandon"):
    """Say that these will not be pulled after all."""

    refs: list[dict[str, Any]]


class PullCommand(Line, frozen=True, tag="pull"):
    """Pull them in order, at most `window` at a time, from the moment `at` on (0: now).

    `lent`: the client does not copy the block ids, which stay as they are. `gap_s`: between the end of
    one and the start of the next, for pulls one at a time.
    """

    case: Case
    refs: list[dict[str, Any]]
    window: int = 1
    at: float = 0.0
    lent: bool = False
    gap_s: float = 0.0


class PullBehind(Line, frozen=True, tag="pull-behind"):
    """Start a large pull, and until it ends pull small ones, one after the other."""

    large: Case
    large_ref: dict[str, Any]
    small: Case
    small_refs: list[dict[str, Any]]


class Stamp(Line, frozen=True, tag="stamp"):
    """Stamp what all slots of the case will move."""

    case: Case
    nonce: int


class Wipe(Line, frozen=True, tag="wipe"):
    """Write zeros where all slots of the case will land."""

    case: Case


class Check(Line, frozen=True, tag="check"):
    """Compare what the first slots hold: the ends of runs, or all of it."""

    case: Case
    nonce: int
    slots: int
    whole: bool = False


# --- to a NIXL agent of its own, or a plain copy


class AttachMemory(Line, frozen=True, tag="attach"):
    """Register the memory of a rank, in place of the last one."""

    deployment: Deployment
    memory: ProcessMemory


class AddRemote(Line, frozen=True, tag="meet"):
    """Get to know the source's agent, and where its memory lies."""

    metadata: str  # base64
    address: int


class MapSourceMemory(Line, frozen=True, tag="meet-memory"):
    """Map the source's memory itself, to copy from."""

    memory: ProcessMemory


class Move(Line, frozen=True, tag="move"):
    """Move `count` requests of the case, at most `window` at a time. `as_one`: one stretch of its bytes."""

    case: Case
    count: int
    window: int = 1
    as_one: bool = False


class SetPolling(Line, frozen=True, tag="attend"):
    """Poll by hand while `on`, so that others can read from here."""

    on: bool


# --- answers


class Done(Line, frozen=True, tag="done"):
    """It is done."""


class RankStarted(Line, frozen=True, tag="begun"):
    """The rank is registered, and this is its memory."""

    memory: ProcessMemory
    register_s: float


class Published(Line, frozen=True, tag="published"):
    """References, in the order of the names."""

    refs: list[dict[str, Any]]


class Moved(Line, frozen=True, tag="moved"):
    """Requests in the order asked, and the large one first where there is one."""

    samples: list[Sample]


class Checked(Line, frozen=True, tag="checked"):
    """How many words are not what they must be."""

    wrong: int


class MemoryAttached(Line, frozen=True, tag="attached"):
    """The memory is registered; what a reader needs of it."""

    metadata: str  # base64
    address: int


class CommandFailed(Line, frozen=True, tag="broken"):
    """The process cannot go on."""

    message: str


RankCommand = (
    StartRank
    | PublishCommand
    | AwaitRelease
    | PrepareCommand
    | AbandonCommand
    | PullCommand
    | PullBehind
    | Stamp
    | Wipe
    | Check
)
BaselineCommand = AttachMemory | AddRemote | MapSourceMemory | Move | SetPolling
Command = RankCommand | BaselineCommand
Reply = Done | RankStarted | Published | Moved | Checked | MemoryAttached | CommandFailed

_ENCODER = msgspec.json.Encoder()
_COMMANDS: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
_REPLIES: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


def encode_line(line: Line) -> bytes:
    """Return it with its newline."""
    return _ENCODER.encode(line) + b"\n"


def decode_command(line: bytes) -> Command:
    """Return what the bench said. Raises msgspec.DecodeError."""
    return _COMMANDS.decode(line)


def decode_reply(line: bytes) -> Reply:
    """Return what a process said. Raises msgspec.DecodeError."""
    return _REPLIES.decode(line)
