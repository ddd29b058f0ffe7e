"""Messages between the daemon and the forkserver, from which movers are forked."""

from __future__ import annotations

from kvxferd.ids import AgentName, MoverId
from kvxferd.wire.codec import Decoder
from kvxferd.wire.common import Message


class Fork(Message, frozen=True):
    """Fork a mover. Carries the mover's end of a socketpair. The reply is `Forked` or `ForkFailed`."""

    mover: MoverId
    agent: AgentName


class LibraryLoaded(Message, frozen=True):
    """The library is imported; movers can be forked. The first message is this or `LibraryUnavailable`."""

    library: str


class LibraryUnavailable(Message, frozen=True):
    """No transfer library works, so there will be no movers."""

    reason: str


class Forked(Message, frozen=True):
    """The mover runs. Carries its pidfd, opened before the process could be reaped."""

    mover: MoverId
    pid: int


class ForkFailed(Message, frozen=True):
    """The mover was not forked."""

    mover: MoverId
    reason: str


TO_FORKSERVER: Decoder[Fork] = Decoder(Fork)
FROM_FORKSERVER: Decoder[LibraryLoaded | LibraryUnavailable | Forked | ForkFailed] = Decoder(
    LibraryLoaded | LibraryUnavailable | Forked | ForkFailed
)
