"""The node as HTTP sees it: reads its state, and feeds an operator's requests to the core."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from kvxferd.control.placement_warnings import active_rdma_cards, placement_warnings
from kvxferd.core.events import (
    DisownRequested,
    Event,
    PeerDropRequested,
    PullCancelRequested,
    Tick,
    TransferCancelRequested,
)
from kvxferd.core.node import Node
from kvxferd.core.ranks.owners import Disownable
from kvxferd.core.ranks.rank import LocalRank
from kvxferd.errors import Code, EngineError
from kvxferd.ids import Endpoint, EngineId, EngineKey, PullId, TransferId
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.plan import TransferTopology
from kvxferd.records import NodeSnapshot
from kvxferd.telemetry.history import History
from kvxferd.telemetry.logs import operator_log
from kvxferd.telemetry.samples import Samples
from kvxferd.telemetry.warnings import Check, NodeWarning, Warnings

# Of the topology: 16 ranks that read 8 engines of 8 stages of 8 ranks. They take 24 ms of the loop, which all
# clients but an operator share. One engine may have 4,096 ranks in a stage.
MAX_STAGES_SHOWN, MAX_RANKS_SHOWN = 1024, 8192


class ReloadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a reload of the configuration has changed."""

    changed: list[str]  # settings
    ignored: list[str]  # settings that differ too, but need a restart
    dropped_peers: list[Endpoint]  # peers that this node was connected to
    closed_sessions: int
    closes_connections: bool  # to the peer socket: an entry of an allow-list was removed


class NodeAdmin:
    """A node as HTTP uses it. `on_event` feeds the core, on the loop's thread."""

    def __init__(
        self,
        node: Node,
        history: History,
        on_event: Callable[[Event], None],
        drain: Callable[[], None],
        reload: Callable[[], ReloadResult],
        samples: Samples | None = None,
        checks: Iterable[Check] = (),
        config_path: str = "",
        settings: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """`checks` find what is to be warned of, beside the ranks' placements.

        `config_path`: of the file with the daemon's settings, "" where there is none. `settings`
        shows them all, as `settings_in_effect` does.
        """
        self.config_path = config_path
        self.settings = settings
        self._node = node
        self.history = history
        self._on_event = on_event
        self.drain = drain
        self.reload = reload
        self.samples = samples or Samples()
        self._cards = active_rdma_cards()
        self.warning_list = Warnings((*checks, self._placements))
        self._drain_result: asyncio.Future[NodeSnapshot] = asyncio.get_running_loop().create_future()

    # --- reading

    def snapshot(self) -> NodeSnapshot:
        """Return the node's current state."""
        self._on_event(Tick())
        return self._node.snapshot()

    def snapshot_steps(self) -> Iterator[NodeSnapshot | None]:
        """Yield None where the loop may run other work, and at last the node's state."""
        self._on_event(Tick())
        return self._node.snapshot_steps()

    def layouts(self, engine_id: EngineId) -> list[tuple[EngineSpec, RankLayout]]:
        """Return the ranks of an engine's newest generation registered here, or else learnt from a peer."""
        newest = self._node.registry.newest(engine_id)
        engine = (
            self._node.registry.get(newest) if newest else self._node.handshake_client.find_engine(engine_id)
        )
        return [(rank.spec, rank.layout) for rank in engine.ranks.values()] if engine else []

    def topologies(self) -> list[dict[str, Any]]:
        """Return the terms of each stage of the remote engines that local ranks know, the last used first."""
        self._on_event(Tick())
        topologies = [
            rank.topology
            for engine in self._node.registry
            for rank in engine.ranks.values()
            if isinstance(rank, LocalRank)
        ]
        return terms_of_all(topologies, self._node.context.now)

    def warnings(self) -> list[NodeWarning]:
        """Return what an operator should fix although the node works, oldest first."""
        return self.warning_list.current()

    def readiness(self) -> list[str]:
        """Return why the node cannot take registrations and pulls; empty if it can."""
        reasons = []
        if self._node.context.draining:
            reasons.append("draining: nothing new is taken")
        movers = self._node.mover_pool
        if movers.unavailable:
            reasons.append(movers.unavailable)
        elif not movers.library:
            reasons.append("the movers' parent is still importing its library")
        return reasons

    def _placements(self) -> list[NodeWarning]:
        return placement_warnings(self._node.engines_snapshot(), self._cards)

    # --- changing

    def drop_peer(self, endpoint: str) -> list[Endpoint]:
        """Forget the daemon of that endpoint, with or without its key. Return the forgotten endpoints."""
        known = self._node.peers.find(endpoint)
        for peer in known:
            operator_log.warning("peer dropped by an operator", endpoint=peer)
            self._on_event(PeerDropRequested(peer))
        return known

    def disown(self, engine_id: EngineId) -> Disownable:
        """Forget the owner of an engine id and its absent ranks. Return what was forgotten; falsy if nothing.

        Raises EngineError(rank-taken) while every recorded rank is registered here.
        """
        found = self._node.disownable(engine_id)
        if not found and self._node.registry.has_local_rank(engine_id):
            raise EngineError(
                f"cannot disown engine {engine_id}: ranks of it are registered here, `kvxferd engines` lists "
                "them; stop the engine, then disown its id",
                Code.RANK_TAKEN,
            )
        if found:
            operator_log.warning(
                "engine id disowned by an operator", engine=engine_id, uid=found.uid, ranks=found.num_ranks
            )
            self._on_event(DisownRequested(engine_id))
        return found

    def cancel_transfer(self, transfer_id: TransferId, engine_id: EngineId | None) -> list[EngineKey]:
        """Release a transfer published here, of that engine or (None) of every one. Return those engines."""
        live = [engine for engine, name in self._node.published.table.live if name == transfer_id]
        matching = [engine for engine in live if engine_id in (None, engine.engine_id)]
        for engine in matching:
            operator_log.warning(
                "transfer cancelled by an operator", transfer=transfer_id, engine=engine.engine_id
            )
            self._on_event(TransferCancelRequested(engine, transfer_id))
        return matching

    def cancel_pull(self, number: PullId) -> bool:
        """End a pull of a local rank. False: no pull of that number can be ended."""
        if not self._node.pulls.can_cancel(number):
            return False
        operator_log.warning("pull cancelled by an operator", pull=number)
        self._on_event(PullCancelRequested(number))
        return True

    def set_drained(self) -> None:
        """Wake the callers of `wait_drained`, with the node's state at the end of the drain."""
        self._drain_result.set_result(self.snapshot())

    async def wait_drained(self) -> NodeSnapshot:
        """Return the node's state at the end of the drain."""
        return await asyncio.shield(self._drain_result)


def terms_of_all(
    topologies: Iterable[TransferTopology], now: float, max_ranks: int = MAX_RANKS_SHOWN
) -> list[dict[str, Any]]:
    """Return the terms of each stage that the topologies know, the last used first, with `last_used_s`.

    At most MAX_STAGES_SHOWN stages, whose engines have at most `max_ranks` ranks in a stage together: the
    terms of one list its ranks.
    """
    known = ((engine.last_used, topology, engine) for topology in topologies for engine in topology.engines())
    found: list[dict[str, Any]] = []
    num_ranks = 0
    for last_used, topology, engine in heapq.nlargest(MAX_STAGES_SHOWN, known, key=lambda one: one[0]):
        for pp_rank, info in engine.stages.items():
            num_ranks += info.remote_tp_size
            if len(found) == MAX_STAGES_SHOWN or num_ranks > max_ranks:
                return found
            terms = topology.terms(engine.engine_id, pp_rank, home=engine.home)
            found.append({**terms, "last_used_s": round(now - last_used, 3)})
    return found
