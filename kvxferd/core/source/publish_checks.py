"""Why a publish is refused. Nothing here changes a transfer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvxferd.core.context import NodeContext
from kvxferd.core.limits.ledger import check_count, check_num_ids, incarnation_bytes, request_bytes
from kvxferd.core.limits.table import BLOCK_ID_BYTES
from kvxferd.core.ranks.registry import LocalEngine, Registry
from kvxferd.core.ranks.session import Session
from kvxferd.core.source.transfer_table import EndedTransfers, TransferTable
from kvxferd.errors import Code, EngineError
from kvxferd.ids import EngineKey, Incarnation, Rank, SessionId
from kvxferd.layout import BlocksByGroup
from kvxferd.plan import check_blocks, check_open_blocks
from kvxferd.wire.limits import MAX_NAME_CHARS
from kvxferd.wire.worker import Publish


class Admitted(NamedTuple):
    """What the checks of a publish have found."""

    engine: LocalEngine
    incarnations: Mapping[Rank, Incarnation]  # the mappings that hold the transfer's bytes
    charged_bytes: int


@dataclass(eq=False, repr=False)
class PublishChecks:
    """Checks each publish against the transfers, the ranks and the limits of this node."""

    _context: NodeContext
    _registry: Registry
    _table: TransferTable
    _ended: EndedTransfers

    def admit(
        self, session: Session, engine_key: EngineKey, message: Publish, blocks: BlocksByGroup
    ) -> Admitted:
        """Raise EngineError for a publish that is wrong or too late, BusyError where there is no room."""
        engine = self._check_publisher(engine_key, message)
        self._check_id(engine_key, message)
        self._check_slot(session.session_id, message)
        what = f"publish transfer {message.transfer_id}"
        limit = self._context.settings.limits.max_transfers_per_engine
        full = f"{what}: engine {engine_key} has {limit} that are held; see `kvxferd transfers`"
        check_count(self._table.num_of_engine(engine_key), limit, full, "limits.max_transfers_per_engine")
        self._ended.make_room(session.uid, what)
        incarnations = self._incarnations_of(session, engine, message)
        charged = request_bytes(blocks) + incarnation_bytes(len(engine.spec.ranks()), message.incarnations)
        self._context.ledger[BLOCK_ID_BYTES].check(session.uid, charged, what)
        self._check_blocks(engine, message, blocks, session.own_rank)
        return Admitted(engine, incarnations, charged)

    @staticmethod
    def _check_blocks(
        engine: LocalEngine, message: Publish, blocks: BlocksByGroup, rank: Rank | None
    ) -> None:
        """Check the block lists against the groups of all ranks: each rank reads only its own groups."""
        check_num_ids(blocks, f"publish transfer {message.transfer_id}")
        unknown = blocks.keys() - {rule.side.group for rule in engine.rules}
        if unknown and (absent := engine.unregistered()):
            # After a restart the ranks come back one by one, in any order.
            raise _refusal(
                message,
                f"no rank that is registered has group {min(unknown)!r}, and ranks "
                f"{', '.join(map(str, absent))} of engine {engine.key} are not there; publish once all ranks "
                "are registered",
                Code.ENGINE_INCOMPLETE,
            )
        if message.ready_tokens == -1:
            check_blocks(engine.rules, blocks, message.num_tokens, "the engine's")
            return
        nobody_extends = rank is None and engine.spec.publish_implies_ready
        if nobody_extends or not 0 <= message.ready_tokens <= message.num_tokens:
            raise _refusal(
                message,
                f"{message.ready_tokens} of {message.num_tokens} tokens are ready; give at most all of them, "
                "and where the engine declares `publish_implies_ready` publish on a rank",
            )
        check_open_blocks(engine.rules, blocks, message.num_tokens)

    def _incarnations_of(
        self, session: Session, engine: LocalEngine, message: Publish
    ) -> Mapping[Rank, Incarnation]:
        """Return the mappings that hold the transfer's bytes, as the publisher knew them at the call.

        They are never taken from the registry: the call may be older than this daemon, and a rank may have
        slept since.
        """
        shape = engine.spec.ranks()
        named = message.incarnations
        if len(named) > len(shape) or any(len(incarnation) > MAX_NAME_CHARS for _, incarnation in named):
            raise _refusal(
                message,
                f"it names {len(named)} incarnations of {len(shape)} ranks; name each rank's once, of "
                f"{MAX_NAME_CHARS} characters at most",
                Code.RANK_INVALID,
            )
        incarnations = engine.intern_incarnations(named)
        if (rank := engine.find_remapped(incarnations)) is not None:
            raise _refusal(
                message,
                f"rank {rank} of engine {engine.key} sleeps, or its memory was mapped anew since `publish` "
                "was called, so the bytes are gone; publish what it computes from here on",
                Code.RANK_LOST,
            )
        own = [] if session.own_rank is None else [session.own_rank]
        needed = shape if engine.spec.publish_implies_ready else own
        unknown = [rank for rank in needed if rank not in incarnations]
        if unknown or not incarnations:
            ranks = ", ".join(map(str, unknown)) or "any"
            raise _refusal(
                message,
                f"its publisher did not know rank {ranks} of engine {engine.key} when `publish` was called; "
                "publish once all ranks are registered",
                Code.TRANSFER_NOT_READY,
            )
        return incarnations

    def _check_publisher(self, key: EngineKey, message: Publish) -> LocalEngine:
        engine, longest_s = self._registry.get(key), self._context.settings.max_lease_s
        if self._context.draining:
            why = "this daemon is draining; publish after it has restarted"
            raise _refusal(message, why, Code.DRAINING)
        if not 0 <= message.lease_s <= longest_s:
            why = f"a lease of {message.lease_s} s; give 0 (the default) to {longest_s:g}"
            raise _refusal(message, why, Code.BAD_REQUEST)
        if engine is None:
            why = f"no rank of engine {key} is registered here; register the ranks first"
            raise _refusal(message, why, Code.ENGINE_INCOMPLETE)
        if not self._registry.is_home(engine.spec):
            why = f"engine {key} is aggregated at {engine.spec.home}; publish on that node"
            raise _refusal(message, why, Code.NOT_HOME)
        return engine

    def _check_id(self, key: EngineKey, message: Publish) -> None:
        ended = self._ended.get((key, message.transfer_id))
        if ended is not None:
            # A client repeats a publish on a new connection, and the end of the old connection has released
            # it. Or it is another transfer of the same id: a late `ready` of a member, or a `Released` that
            # is still under way, would count for the new one.
            why = f"it was released ({ended.why}), and its ranks know; publish under another id"
            is_same = ended.nonce == message.nonce
            raise _refusal(message, why, Code.RELEASED if is_same else Code.TRANSFER_EXISTS)
        if (key, message.transfer_id) in self._table.live:
            why = "it is published already; unpublish it first, or choose another id"
            raise _refusal(message, why, Code.TRANSFER_EXISTS)

    def _check_slot(self, session: SessionId, message: Publish) -> None:
        """Refuse a fence slot that is in use: the end of one transfer would void the other.

        This limits the number of a session's transfers, too.
        """
        if (holder := self._table.in_slot(session, message.fence_slot)) is not None:
            slot, transfer_id = message.fence_slot, holder.transfer_id
            why = f"fence slot {slot} is transfer {transfer_id}'s, which is not released yet"
            raise _refusal(message, why, Code.OUT_OF_PLACE)


def _refusal(message: Publish, why: str, code: Code | None = None) -> EngineError:
    return EngineError(f"cannot publish transfer {message.transfer_id}: {why}", code)
