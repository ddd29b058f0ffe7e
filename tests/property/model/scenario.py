"""What is explored: who is there, what they may do, and how much may go wrong."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvxferd.config import PeerConfig, TransferConfig
from kvxferd.core import Settings

# Powers of two and their sums: clocks are exact, so that equal states are found equal.
SETTINGS = Settings(
    deadline_notice_s=0.0,  # what is asked then changes messages alone, and each state would have it
    transfer=TransferConfig(lease_s=6.0, max_hold_s=16.0, unknown_wait_s=1.0),  # renewed every second
    peer=PeerConfig(handshake_wait_s=4.0, request_timeout_s=2.0, silent_after_s=4.0),
    acknowledge_for_s=8.0,
    quiesce_s=2.0,
    polling_linger_s=1.0,
    tombstone_s=16.0,
    member_heartbeat_s=4.0,
)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One size. The source publishes `transfers` transfers, one after another in the same blocks."""

    readers: int = 1  # ranks of the engine that reads
    transfers: int = 1
    drops: int = 0  # messages between the nodes that may be lost
    duplicates: int = 0  # messages that may arrive twice
    clocks: tuple[int, int] = (
        0,
        0,
    )  # how often the source's and the sink's may move, to any timer of its node
    unpublish: bool = True
    cancel: bool = True
    close: bool = False  # a worker may die
    deaths: int = 0  # movers that may die, on each node
    doubt: bool = False  # movers may say that they do not know whether a read has ended
    deliveries: bool = False  # movers have room to tell their worker first, and then their daemon
    cold: bool = False  # with the handshake; else it is over when the exploration starts
    blocks: int = 2  # of a transfer
    scheduler: bool = False  # a scheduler publishes, not the source's rank
    lag: bool = False  # what the scheduler and its daemon send each other arrives later, in order
    grows: bool = False  # transfers are published with a block, and extended; pulls are progressive
    ready: bool = False  # ranks say `ready`; else the engine's publish implies it
    again: bool = False  # the last transfer is pulled once more
    spans: bool = False  # the source's second rank is on the sink's node, and joins its home
    sleeps: int = 0  # how often each of the source engine's ranks may be suspended
    crashes: tuple[int, int] = (0, 0)  # how often the source's and the sink's daemon may die
    blind: bool = False  # movers believe every fence word: to show that the check can fail

    @property
    def pulls(self) -> int:
        """How many a process's reading rank asks for, one after another."""
        return self.transfers + self.again

    @property
    def columns(self) -> int:
        """How many ranks the source's engine has."""
        return 2 if self.spans else 1

    @property
    def has_restarts(self) -> bool:
        """Whether daemons or memory go away, so that even a correct publish may be refused."""
        return self.spans or self.sleeps > 0 or any(self.crashes)

    @property
    def before(self) -> tuple[tuple[str, tuple[object, ...]], ...]:
        """What is done before the exploration starts, on which host.

        An engine over two nodes cannot be seen to agree when to write: its blocks are written first.
        """
        if not self.spans:
            return ()
        return (("source", ("ready", 0, 1)),) if self.ready else (("source", ("publish", 1)),)

    def __str__(self) -> str:
        told = ", ".join(f"{name}={value}" for name, value in self.settings().items())
        return told.replace(" ", "") or "smallest"

    def settings(self) -> dict[str, object]:
        """What differs from the smallest size."""
        plain = Scenario()
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(plain, name)}
