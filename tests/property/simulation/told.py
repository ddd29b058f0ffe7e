"""What daemons tell workers and movers tell daemons, checked where it is said: a client hides some of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxferd.client import events as ce
from kvxferd.core.ranks.rank import MemberRank
from kvxferd.errors import Code
from kvxferd.ids import EngineKey, GrantId, Rank
from kvxferd.wire import mover as mv
from kvxferd.wire import worker as wk
from kvxferd.wire.common import Message
from kvxferd.wire.peer import LeaveRank
from tests.property.simulation.memory import UNIT_BYTES
from tests.property.simulation.oracle import Violation

if TYPE_CHECKING:
    from tests.property.simulation.daemon import Connection, Daemon
    from tests.property.simulation.mover import Mover
    from tests.property.simulation.process import Process


class ToldWorker:
    """What a daemon has said over one connection: each pull ends once, each transfer is released once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ended: dict[int, bool] = {}  # by ticket: whether its blocks are safe
        self._released: set[str] = set()

    def check(self, message: Message) -> None:
        """Check the next message. Raises Violation."""
        match message:
            case wk.TicketDelivered() | wk.TicketFailed():
                if message.ticket in self._ended:
                    raise Violation(
                        "violations", f"{self._name} is told twice of the end of {message.ticket}"
                    )
                self._ended[message.ticket] = isinstance(message, wk.TicketDelivered) or message.safe_to_reuse
            case wk.TicketQuiesced():
                if self._ended.get(message.ticket, True):
                    text = f"{self._name} is told that {message.ticket} is quiet, which was safe before"
                    raise Violation("violations", text)
                self._ended[message.ticket] = True
            case wk.Released():
                if message.transfer_id in self._released:
                    text = f"{self._name} is told twice that {message.transfer_id} is released"
                    raise Violation("violations", text)
                self._released.add(message.transfer_id)


def check_new_grants(daemon: Daemon, before: set[GrantId]) -> set[GrantId]:
    """Return the daemon's grants. Raises Violation for a new one that its reader cannot use."""
    table = daemon.node.published.table
    for grant_id in table.by_grant.keys() - before:
        transfer = table.by_grant[grant_id]
        if daemon.node.registry.is_superseded(transfer.engine):
            text = f"{daemon.name} grants {transfer.transfer_id} of {transfer.engine}, which is replaced"
            raise Violation("violations", text)
        for agent in sorted(transfer.grants[grant_id].agents):
            mover = daemon.world.mover_of(agent)
            if mover is not None and mover.is_alive and not mover.polls_for_others:
                text = f"{daemon.name} grants {transfer.transfer_id}, and {agent} does not poll"
                raise Violation("violations", text)
    return set(table.by_grant)


def check_word(connection: Connection, message: wk.Released) -> None:
    """Raise Violation where a publisher is told of a release, and the word still proves reads."""
    process = connection.process
    publish = process.session._publishes._live.get(message.transfer_id)
    if publish is not None and connection.page is not None and publish.slot in connection.page.live_slots:
        text = f"{process.name} is told of the release of {message.transfer_id} before its word is over"
        raise Violation("violations", text)


def check_ended(daemon: Daemon, engine: EngineKey) -> None:
    """Raise Violation where transfers of an engine live on without one of its ranks."""
    if left := [t.transfer_id for t in daemon.node.published.table.of_engine(engine)]:
        raise Violation("violations", f"a rank of {engine} is gone, and {left} live at {daemon.name}")


def check_left(daemon: Daemon, message: LeaveRank, joined: MemberRank | None) -> None:
    """Raise Violation where a home has lost a rank by a request that is older than its last `joined`."""
    key = EngineKey(message.engine_id, message.generation)
    is_late = joined is not None and (joined.boot != message.boot or joined.request > message.request)
    if is_late and joined_rank(daemon, key, message.rank) is None:
        text = f"{daemon.name} has lost {message.rank} of {key} by request {message.request}, which is late"
        raise Violation("violations", text)


def joined_rank(daemon: Daemon, key: EngineKey, rank: Rank) -> MemberRank | None:
    """Return a rank that another node has joined at its home."""
    engine = daemon.node.registry.get(key)
    record = engine.ranks.get(rank) if engine is not None else None
    return record if isinstance(record, MemberRank) else None


# Why no pull fails among honest nodes.
_OF_LIARS = frozenset({
    Code.OUT_OF_PLACE, Code.INTERNAL, Code.BLOCKS_INVALID, Code.COVERAGE_GAP, Code.LAYOUT_INCOMPATIBLE,
    Code.BAD_VERSION, Code.FRAME_TOO_LARGE, Code.BAD_FRAME,
})  # fmt: skip


def check_reason(process: Process, event: ce.Failed) -> None:
    """Raise Violation where a pull failed because of what an honest node would not say."""
    is_cut_off = "inside a frame" in event.message or "descriptors were cut off" in event.message
    if event.code in _OF_LIARS and not is_cut_off:
        text = f"pull {event.ticket.number} of {process.name} failed: {event.message}"
        raise Violation("violations", text)


def check_is_free(process: Process, ids: list[int]) -> None:
    """Raise Violation where blocks that a rank may use again may still be written by a mover."""
    blocks = set(ids)
    for mover in process.movers:
        is_there = mover.is_alive and process.memory is not None and mover.bound is process.memory
        if is_there and (found := blocks & mover.blocks_to_write()):
            text = f"blocks {sorted(found)} of {process.name} are said to be safe: {mover.name} has them"
            raise Violation("violations", text)


def blocks_of(start: mv.StartPull) -> set[int]:
    """Return the blocks that a pull of a mover writes."""
    return set(memoryview(start.local["full"].ids).cast("i"))


def check_is_over(mover: Mover, start: mv.StartPull) -> None:
    """Raise Violation where a pull that its mover calls over may still be written."""
    content = mover.process.content
    memory = mover.bound
    if content is None or memory is None:
        return
    blocks = blocks_of(start)
    for offset in mover.transport.offsets_in_flight(memory):
        if content.block_of[offset // UNIT_BYTES] in blocks:
            text = f"{mover.name} calls pull {start.pull} over, and a read of it is in flight"
            raise Violation("violations", text)
