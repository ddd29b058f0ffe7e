"""One connection on the worker socket, and which messages it may send as what it has registered as."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto

from kvxferd.core.ranks.rank import LocalRank
from kvxferd.errors import Code, EngineError, ProtocolError
from kvxferd.ids import EngineKey, Rank, SessionId
from kvxferd.wire import worker
from kvxferd.wire.block_id_parts import BlockIdAssembly
from kvxferd.wire.common import BlockIds, FdBatch, TransferRef


class SessionState(IntEnum):
    """What a connection is: a column of `ACCESS`."""

    CONNECTED = 0
    GREETED = 1
    PUBLISHER = 2
    RANK = 3


class Access(Enum):
    """What becomes of a message."""

    HANDLE = auto()
    REFUSE = auto()  # it has a reply, which says why
    IGNORE = auto()  # a correct client sent it before it knew that its registration was refused
    BREAK = auto()  # the connection ends: no correct client sends it


HANDLE, REFUSE, IGNORE, BREAK = Access

ACCESS: dict[type[worker.ClientMessage], tuple[Access, Access, Access, Access]] = {
    # connected, greeted, publisher, rank
    worker.Hello: (HANDLE, BREAK, BREAK, BREAK),
    worker.Register: (BREAK, HANDLE, REFUSE, BREAK),
    worker.Attach: (BREAK, HANDLE, REFUSE, REFUSE),
    FdBatch: (BREAK, IGNORE, IGNORE, IGNORE),  # the shell keeps its descriptors
    BlockIds: (BREAK, BREAK, HANDLE, HANDLE),
    worker.Publish: (BREAK, REFUSE, HANDLE, HANDLE),
    worker.Ready: (BREAK, BREAK, HANDLE, HANDLE),
    worker.Unpublish: (BREAK, BREAK, HANDLE, HANDLE),
    worker.Prepare: (BREAK, BREAK, BREAK, HANDLE),
    worker.PullRequest: (BREAK, REFUSE, REFUSE, HANDLE),
    worker.Cancel: (BREAK, BREAK, BREAK, HANDLE),
    worker.DeliveredByMover: (BREAK, BREAK, BREAK, HANDLE),
    worker.PullsResumed: (BREAK, BREAK, BREAK, HANDLE),
    worker.Abandon: (BREAK, BREAK, BREAK, HANDLE),
    worker.Suspend: (BREAK, BREAK, BREAK, HANDLE),
    worker.Resume: (BREAK, REFUSE, REFUSE, HANDLE),
    worker.NewMover: (BREAK, IGNORE, BREAK, HANDLE),
    worker.MoverAcknowledged: (BREAK, IGNORE, BREAK, HANDLE),
}


@dataclass(slots=True)
class Session:
    """One connection. It is a rank, or publishes for an engine, or has registered as neither yet."""

    session_id: SessionId
    pid: int
    uid: int
    greeted: bool = False
    rank: LocalRank | None = None
    attached: EngineKey | None = None
    num_offers: int = 0  # of movers so far; the last offer has this number
    replies_once_unmapped: list[worker.Refused | worker.Suspended] = field(default_factory=list)
    assembly: BlockIdAssembly = field(default_factory=BlockIdAssembly)
    abandoning: set[TransferRef] = field(default_factory=set)  # sent to the source, without a reply yet

    @property
    def state(self) -> SessionState:
        """What it has registered as."""
        if self.rank is not None:
            return SessionState.RANK
        if self.attached is not None:
            return SessionState.PUBLISHER
        return SessionState.GREETED if self.greeted else SessionState.CONNECTED

    def accepts(self, message: worker.ClientMessage) -> bool:
        """Return whether to handle the message; False: ignore it.

        Raises EngineError(out-of-place) for one to refuse, ProtocolError for one that ends the connection.
        """
        access = ACCESS[type(message)][self.state]
        if access is HANDLE:
            return True
        why = f"cannot take {type(message).__name__}: this connection {self._describe()}"
        if access is BREAK:
            raise ProtocolError(why, Code.OUT_OF_PLACE)
        if access is REFUSE:
            raise EngineError(why, Code.OUT_OF_PLACE)
        return False

    def _describe(self) -> str:
        match self.state:
            case SessionState.RANK:
                return f"is rank {self.local_rank.spec.rank} of engine {self.engine}; open another"
            case SessionState.PUBLISHER:
                return f"publishes for engine {self.attached} and is not a rank; open another"
            case SessionState.GREETED:
                return "is neither a rank nor a publisher; register or attach first"
            case SessionState.CONNECTED:
                return "has not sent Hello, which is the first message"

    @property
    def engine(self) -> EngineKey | None:
        """The engine that it may publish for."""
        return self.rank.spec.key if self.rank is not None else self.attached

    @property
    def local_rank(self) -> LocalRank:
        """The rank that it is, of a session in state RANK."""
        assert self.rank is not None
        return self.rank

    @property
    def own_rank(self) -> Rank | None:
        """Its rank in that engine; None for a scheduler."""
        return self.rank.spec.rank if self.rank is not None else None
