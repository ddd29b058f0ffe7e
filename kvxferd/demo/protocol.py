"""Messages between the demo and its workers: JSON lines on standard input and output."""

from __future__ import annotations

from typing import Any

from kvxferd.demo.shape import DemoShape, Role
from kvxferd.ids import Rank
from kvxferd.tooling.line_protocol import CommandFailed, Line, LineProtocol


class StartRank(Line, frozen=True, tag="begin"):
    """Allocate memory, connect, and register as this rank."""

    shape: DemoShape
    role: Role
    rank: Rank
    worker_socket: str


class PrefillCommand(Line, frozen=True, tag="prefill"):
    """Write a request's cache and report that it is ready; one rank publishes it."""

    request: int
    publish: bool


class AwaitRelease(Line, frozen=True, tag="await-release"):
    """Wait until a request's blocks are released; with `unpublish`, end the publication first."""

    request: int
    unpublish: bool


class PullCommand(Line, frozen=True, tag="pull"):
    """Pull a request's cache and check it. `damage` corrupts one byte in between."""

    request: int
    ref: dict[str, Any]
    damage: str = ""  # "item": one of the pulled bytes; "spill": one of the others


class RankStarted(Line, frozen=True, tag="begun"):
    """The rank is registered."""

    register_s: float


class Prefilled(Line, frozen=True, tag="prefilled"):
    """The request's blocks are written."""

    ref: dict[str, Any] | None  # from the rank that published


class BlocksFreed(Line, frozen=True, tag="freed"):
    """The request's blocks are released."""

    why: str


class PullResult(Line, frozen=True, tag="pulled"):
    """The outcome of a pull, and of the check of the memory."""

    delivered: bool
    code: str
    message: str
    bytes: int
    runs: int
    elapsed_s: float  # as the engine measures it: from the call of `pull` to its event
    checked_items: int
    wrong_items: int
    spilled_bytes: int
    first_wrong: str


Command = StartRank | PrefillCommand | AwaitRelease | PullCommand
Reply = RankStarted | Prefilled | BlocksFreed | PullResult | CommandFailed

PROTOCOL: LineProtocol[Command, Reply] = LineProtocol(Command, Reply)
