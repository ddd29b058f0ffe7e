"""Messages between the daemon and the movers' parent."""

from __future__ import annotations

from kvxferd.ids import AgentName, MoverId
from kvxferd.wire.codec import Decoder
from kvxferd.wire.common import Message


class Fork(Message, frozen=True, tag="fork"):
    """Make a mover. Carries its end of the socketpair. Answered by `Forked` or `ForkFailed`."""

    mover: MoverId
    agent: AgentName


class LibraryLoaded(Message, frozen=True, tag="ready"):
    """The library is imported; movers can be forked. First message, or `Unavailable` is."""

    library: str


class LibraryUnavailable(Message, frozen=True, tag="unavailable"):
    """There is no transfer library that works: there will be no movers."""

    reason: str


class Forked(Message, frozen=True, tag="forked"):
    """The mover runs. Carries its pidfd, opened before anybody could reap it."""

    mover: MoverId
    pid: int


class ForkFailed(Message, frozen=True, tag="fork-failed"):
    """There is no such mover."""

    mover: MoverId
    reason: str


TO_FORKSERVER: Decoder[Fork] = Decoder(Fork)
FROM_FORKSERVER: Decoder[LibraryLoaded | LibraryUnavailable | Forked | ForkFailed] = Decoder(
    LibraryLoaded | LibraryUnavailable | Forked | ForkFailed
)
