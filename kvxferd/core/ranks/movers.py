"""The movers of this node: the rank that each serves, the plans and remote agents that it has loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import KillMover, SendToMover
from kvxferd.core.tables import decrease
from kvxferd.errors import Code, PeerError
from kvxferd.ids import AgentName, Digest, Endpoint, EngineKey, MoverId, SessionId
from kvxferd.plan import Plan, encode_plan, plan_bytes
from kvxferd.wire.mover import DropPlan, DropRemote, LoadPlan, LoadRemote

# A retired mover's other pulls, and the pulls of peers that read from it, have this long to end. The next
# mover reads again what does not end. Blocks in doubt wait as long; a pull takes well below a second.
RETIRED_S = 10.0
# The plans of a mover, as they are decoded there. The largest has 30 MiB; a node keeps 160 MiB of them.
MAX_PLAN_BYTES_PER_MOVER = 64 << 20
# What a mover knows of one peer's agents. Those of 64 ranks in 8,192 pieces each take 52 MB, the largest
# engine's 4,096 with 1 KiB each 8. A grant brings metadata of a fence page, 400 bytes; a peer that sends
# another 2 MiB with each, or names another agent, would fill the daemon and the mover.
MAX_REMOTE_BYTES_PER_PEER = 64 << 20
REMOTE_OVERHEAD_BYTES = 1024  # of each agent, beside its metadata


RemoteMetadata = tuple[AgentName, bytes, int]  # an agent, its metadata, and `word` as in `LoadRemote`


class MoverState(Enum):
    """What becomes of a mover, in this order, until its death removes it. It may be killed unretired."""

    SERVING = auto()
    RETIRED = auto()  # it ends when its pulls have ended; another one serves its rank
    DYING = auto()  # killed; a resident one was requested to end


@dataclass(slots=True)
class RemoteAgent:
    """What a mover knows of an agent that it reads from."""

    peer: Endpoint  # that named it first
    last_used: float = 0.0
    loaded: set[bytes] = field(default_factory=set)  # its metadata, as the mover has it


@dataclass(slots=True)
class Mover:
    """One mover, from its assignment to a rank until its death."""

    mover_id: MoverId
    session: SessionId
    agent: AgentName
    resident: bool = False  # a thread of the worker: requested to end, never killed
    state: MoverState = MoverState.SERVING
    engine: EngineKey | None = None  # of its rank, once it serves one
    worn: bool = False  # its buffers are in doubt, and only its death frees them
    plans: dict[Digest, int] = field(default_factory=dict)  # bytes of each, the longest unused first
    remotes: dict[AgentName, RemoteAgent] = field(default_factory=dict)  # the longest unused first
    remote_bytes_of: Counter[Endpoint] = field(default_factory=Counter)  # that these take, by peer


class Movers:
    """Loads plans and remote agents into movers, each once; retires and kills movers."""

    def __init__(
        self, context: NodeContext, on_leaving: Callable[[Mover], None], is_needed: Callable[[Mover], bool]
    ) -> None:
        self._context = context
        self._on_leaving = on_leaving  # called when a mover serves its rank no more, dead or not
        self._is_needed = is_needed  # whether a retired mover still runs a pull, or a peer reads from it
        self._movers: dict[MoverId, Mover] = {}

    def add(self, mover: Mover) -> None:
        """Add a mover that was assigned to a session."""
        self._movers[mover.mover_id] = mover

    def get(self, mover: MoverId) -> Mover | None:
        """Return the mover; None: it is dead."""
        return self._movers.get(mover)

    def accepts_pulls(self, mover: MoverId) -> bool:
        """Whether the mover gets new pulls: it is neither dead nor about to end."""
        known = self._movers.get(mover)
        return known is not None and known.state is MoverState.SERVING

    def get_by_agent(self, agent: AgentName) -> Mover | None:
        """Return the mover whose agent this is; None: it is dead, or on another node."""
        return next((mover for mover in self._movers.values() if mover.agent == agent), None)

    def remove(self, mover: MoverId) -> Mover | None:
        """Remove a dead mover and return it."""
        self._context.timers.cancel(("retired", mover))
        return self._movers.pop(mover, None)

    def has_mover(self, session: SessionId) -> bool:
        """Whether a mover of the session lives, and may still reach the rank's memory."""
        return bool(self._of(session))

    def _of(self, session: SessionId) -> list[Mover]:
        return [mover for mover in self._movers.values() if mover.session == session]

    def retire(self, mover: MoverId) -> None:
        """Give the mover no new pulls. Kill it when its pulls have ended, after `RETIRED_S` at the latest.

        A rank has one retired mover at most: each maps the rank's memory, on a GPU in a context of its own.
        """
        known = self._movers.get(mover)
        if known is None or known.state is not MoverState.SERVING:
            return
        self.kill_others(known)
        known.state = MoverState.RETIRED
        self._context.after(("retired", mover), RETIRED_S, lambda: self.kill(mover))
        self._schedule_leaving(known)

    def reconsider(self, mover: MoverId | None) -> None:
        """Kill a retired mover that is not needed any more."""
        known = self._movers.get(mover) if mover is not None else None
        if known is not None and known.state is MoverState.RETIRED and not self._is_needed(known):
            self.kill(known.mover_id)

    def kill_others(self, kept: Mover) -> bool:
        """Kill the other movers of the mover's session. Return whether one of them will be dead soon.

        A resident one that was asked to end before may be stuck, and would be waited for for ever.
        """
        others = [mover for mover in self._of(kept.session) if mover is not kept]
        will_end = any(not mover.resident or mover.state is not MoverState.DYING for mover in others)
        for mover in others:
            self.kill(mover.mover_id)
        return will_end

    def kill_all(self, session: SessionId) -> None:
        """Kill every mover of the session."""
        for mover in self._of(session):
            self.kill(mover.mover_id)

    def _schedule_leaving(self, mover: Mover) -> None:
        """Take it from its rank once the caller has returned, which may be going through the rank's pulls."""
        self._context.after(("leaving", mover.mover_id), 0.0, lambda: self._leave(mover))

    def _leave(self, mover: Mover) -> None:
        self._on_leaving(mover)
        self.reconsider(mover.mover_id)

    def num_children(self) -> int:
        """Return how many of the movers are processes of their own."""
        return sum(not mover.resident for mover in self._movers.values())

    def num_ending(self) -> int:
        """Return how many movers get nothing new and are not dead yet."""
        return sum(mover.state is not MoverState.SERVING for mover in self._movers.values())

    def kill(self, mover: MoverId) -> None:
        """Kill the mover, once. A resident mover may never end, so its rank does not wait for it."""
        known = self._movers.get(mover)
        if known is None or known.state is MoverState.DYING:
            return
        known.state = MoverState.DYING
        self._context.emit(KillMover(mover))
        if known.resident:
            self._schedule_leaving(known)

    def load_plan(self, mover: MoverId, plan: Plan) -> None:
        """Send the plan to the mover, unless it has it."""
        known = self._movers[mover]
        num_bytes = known.plans.pop(plan.digest, 0)
        if not num_bytes:
            num_bytes = plan_bytes(plan)
            self._drop_plans(known, num_bytes)
            self._context.emit(SendToMover(mover, LoadPlan(digest=plan.digest, encoded=encode_plan(plan))))
        known.plans[plan.digest] = num_bytes

    def _drop_plans(self, mover: Mover, num_bytes: int) -> None:
        """Make room for one more. A pull that needs one that was dropped loads it again."""
        held = sum(mover.plans.values())
        for digest, size in list(mover.plans.items()):
            if held + num_bytes <= MAX_PLAN_BYTES_PER_MOVER:
                return
            held -= size
            del mover.plans[digest]
            self._context.emit(SendToMover(mover.mover_id, DropPlan(digest=digest)))

    def load_remotes(self, mover: MoverId, peer: Endpoint, wanted: Sequence[RemoteMetadata]) -> None:
        """Send what one grant reads to the mover, unless it has it.

        Raises PeerError where another peer named an agent first: the library would replace the way to it.
        """
        known, is_complete, more = self._movers[mover], True, 0
        self._forget_stale(known)
        for agent, metadata, _ in wanted:
            if (remote := known.remotes.pop(agent, None)) is None:
                remote = RemoteAgent(peer)
                known.remote_bytes_of[peer] += REMOTE_OVERHEAD_BYTES
            remote.last_used = self._context.now
            known.remotes[agent] = remote  # the last one
            if metadata in remote.loaded:
                continue
            is_complete, more = False, more + len(metadata)
            if remote.peer != peer:
                raise PeerError(
                    f"cannot read from agent {agent} as {peer} describes it: it is an agent of {remote.peer}",
                    Code.BAD_FRAME,
                )
        if is_complete:
            return
        self._make_room(known, peer, {agent for agent, _, _ in wanted}, more)
        for agent, metadata, word in wanted:
            remote = known.remotes[agent]
            if metadata not in remote.loaded:
                remote.loaded.add(metadata)
                known.remote_bytes_of[peer] += len(metadata)
                self._context.emit(SendToMover(mover, LoadRemote(agent=agent, metadata=metadata, word=word)))

    def _make_room(self, mover: Mover, peer: Endpoint, wanted: set[AgentName], num_bytes: int) -> None:
        """Forget agents of that peer, the longest unused first. A pull that needs one loads it again.

        What one grant reads may be more than the limit: it is loaded all the same.
        """
        for agent in [agent for agent, remote in mover.remotes.items() if remote.peer == peer]:
            if mover.remote_bytes_of[peer] + num_bytes <= MAX_REMOTE_BYTES_PER_PEER:
                return
            if agent in wanted:
                self.drop_remote(mover.mover_id, agent)
            else:
                self._forget_agent(mover, agent)

    def _forget_stale(self, mover: Mover) -> None:
        """Forget agents that no running pull needs any more: each restart of an engine brings new ones."""
        since = self._context.now - self._context.settings.transfer.max_hold_s
        while mover.remotes:
            agent, oldest = next(iter(mover.remotes.items()))
            if oldest.last_used >= since:
                return
            self._forget_agent(mover, agent)

    def _forget_agent(self, mover: Mover, agent: AgentName) -> None:
        self.drop_remote(mover.mover_id, agent)
        decrease(mover.remote_bytes_of, mover.remotes.pop(agent).peer, REMOTE_OVERHEAD_BYTES)

    def drop_remote(self, mover: MoverId, agent: AgentName) -> None:
        """Have the mover drop the agent's metadata: a read from it failed, or there is no room.

        The agent stays that of the peer that named it first. Otherwise a peer that made a read fail, by an
        address that does not exist, could be the next to describe the agent.
        """
        if (known := self._movers.get(mover)) is None:
            return
        remote = known.remotes.get(agent)
        if remote is None or not remote.loaded:
            return
        known.remote_bytes_of[remote.peer] -= sum(map(len, remote.loaded))
        remote.loaded.clear()
        self._context.emit(SendToMover(mover, DropRemote(agent=agent)))
