"""What a session tells its engine, in the order in which it happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvxferd.client.blocks import BlockList
from kvxferd.errors import Code
from kvxferd.ids import Ticket, TransferId


class PullTicket:
    """One pull. Every event of the pull carries this same object."""

    __slots__ = ("_cancel", "number", "transfer_id")

    def __init__(self, number: Ticket, transfer_id: TransferId, cancel: Callable[[Ticket], None]) -> None:
        self.number = number
        self.transfer_id = transfer_id
        self._cancel = cancel

    def cancel(self) -> None:
        """Ask for the pull to end. Its one terminal event still comes, Delivered if it was quicker."""
        self._cancel(self.number)

    def __repr__(self) -> str:
        return f"<PullTicket {self.number} of {self.transfer_id}>"


@dataclass(frozen=True, slots=True)
class Delivered:
    """The pull's blocks hold exactly the published bytes. Terminal."""

    ticket: PullTicket
    bytes: int
    runs: int
    wire_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The pull ended without its bytes. Terminal.

    `blocks` are those given to `pull`, as they were then. When `safe_to_reuse` is False a transport may
    still write them: keep them out of use until `Quiesced` with the same ticket.
    """

    ticket: PullTicket
    code: Code
    message: str
    blocks: Mapping[str, BlockList]
    safe_to_reuse: bool
    retry_after_s: float = 0.0  # with the code `busy`: when pulling again may help


@dataclass(frozen=True, slots=True)
class Quiesced:
    """Nothing writes these blocks of a failed pull any more. At most once, after an unsafe Failed."""

    ticket: PullTicket
    blocks: Mapping[str, BlockList]


@dataclass(frozen=True, slots=True)
class Released:
    """The transfer is over: its blocks are the engine's again, on this rank."""

    transfer_id: TransferId
    why: Code


@dataclass(frozen=True, slots=True)
class PublishRefused:
    """The daemon did not take the publish; its blocks are the engine's again."""

    transfer_id: TransferId
    code: Code
    message: str
    retry_after_s: float = 0.0  # with the code `busy`: when publishing again may help


@dataclass(frozen=True, slots=True)
class Suspended:
    """No other process maps the rank's memory: it may be freed now."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The session is over for good; every later call raises KvxferdError with this code.

    Not sent when a daemon merely went away: the client reconnects to the next one by itself.
    """

    code: Code
    message: str


Event = Delivered | Failed | Quiesced | Released | PublishRefused | Suspended | Disconnected
Emit = Callable[[Event], None]
