"""What each mover of this node has been given: whose it is, which plans and remote agents it knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import KillMover, SendToMover
from kvxferd.errors import Code, PeerError
from kvxferd.ids import AgentName, Digest, Endpoint, EngineKey, MoverId, SessionId
from kvxferd.plan import Plan, encode_plan
from kvxferd.wire.mover import DropRemote, LoadPlan, LoadRemote

# A retired mover's other pulls have this long to end, and so have those who read from it. What does not
# end is read again by the next mover. Blocks in doubt wait as long; a pull takes well below a second.
RETIRED_S = 10.0
# What a mover has loaded of one peer's agents: two of the largest manifests. A grant brings metadata of a
# fence page, 400 bytes; a peer that sends another 2 MiB with each would fill the daemon and the mover.
MAX_LOADED_BYTES_PER_PEER = 32 << 20
REMOTE_OVERHEAD_BYTES = 256  # of each, beside the metadata itself: an estimate
STUCK_S = 2.0  # a resident mover that was told to end is gone within milliseconds, or is stuck


@dataclass(slots=True)
class Mover:
    """One mover, from the moment it serves a rank until it is dead."""

    mover_id: MoverId
    session: SessionId
    agent: AgentName
    engine: EngineKey | None = None  # its rank's, once it serves one
    plans: set[Digest] = field(default_factory=set)
    remotes: dict[AgentName, set[bytes]] = field(default_factory=dict)  # metadata loaded, by agent
    learnt_from: dict[AgentName, Endpoint] = field(default_factory=dict)  # the peer that named it first
    loaded_bytes_of: Counter[Endpoint] = field(default_factory=Counter)  # bytes of the remotes, by that peer
    last_used: dict[AgentName, float] = field(
        default_factory=dict
    )  # when each was last asked for, oldest first
    resident: bool = False  # a thread of the worker: told to end, never killed
    retired: bool = False  # it ends when what it runs has ended; another serves its rank
    dying: bool = False
    retired_at: float = 0.0
    kill_sent_at: float = 0.0  # when a dying one was told
    has_left: bool = False  # it serves nobody any more


class Movers:
    """Gives each mover what it lacks, once."""

    def __init__(
        self, context: NodeContext, on_leaving: Callable[[Mover], None], is_needed: Callable[[Mover], bool]
    ) -> None:
        self._context = context
        self._on_leaving = on_leaving  # a mover serves nobody any more, dead or not
        self._is_needed = is_needed  # whether a pull of a retired mover runs, or somebody reads from it
        self._movers: dict[MoverId, Mover] = {}
        self._by_agent: dict[AgentName, MoverId] = {}

    def add(self, mover: Mover) -> None:
        """A mover was taken for a session."""
        self._movers[mover.mover_id] = mover
        self._by_agent[mover.agent] = mover.mover_id

    def get(self, mover: MoverId) -> Mover | None:
        """The mover, if it lives."""
        return self._movers.get(mover)

    def accepts_pulls(self, mover: MoverId) -> bool:
        """Whether it takes new pulls: it lives, and is neither retired nor told to end."""
        known = self._movers.get(mover)
        return known is not None and not known.retired and not known.dying

    def get_by_agent(self, agent: AgentName) -> Mover | None:
        """The mover whose agent this is, if it lives here."""
        mover = self._by_agent.get(agent)
        return self._movers.get(mover) if mover is not None else None

    def remove(self, mover: MoverId) -> Mover | None:
        """The mover is dead."""
        known = self._movers.pop(mover, None)
        self._context.timers.cancel(("retired", mover))
        if known is not None:
            del self._by_agent[known.agent]
        return known

    def has_mover(self, session: SessionId) -> bool:
        """Whether a mover of the session is not dead yet: it may still reach the rank's memory."""
        return any(mover.session == session for mover in self._movers.values())

    def retire(self, mover: MoverId) -> None:
        """Give it nothing new, and have it killed when what it runs has ended, `RETIRED_S` from now at last.

        One retired mover a rank: each holds the rank's memory, on a GPU in a context of its own.
        """
        known = self._movers.get(mover)
        if known is None or known.dying or known.retired:
            return
        self.kill_retired(known.session)
        known.retired, known.retired_at = True, self._context.now
        self._context.after(("retired", mover), RETIRED_S, lambda: self.kill(mover))
        self._schedule_leaving(known)

    def reconsider(self, mover: MoverId | None) -> None:
        """Kill a retired mover that nobody needs any more."""
        known = self._movers.get(mover) if mover is not None else None
        if known is not None and known.retired and known.has_left and not self._is_needed(known):
            self.kill(known.mover_id)

    def kill_retired(self, session: SessionId) -> bool:
        """Kill what the session has of retired movers; return whether any lives still."""
        retired = [m for m in self._movers.values() if m.session == session and m.retired]
        for known in retired:
            self.kill(known.mover_id)
        return bool(retired)

    def kill_all(self, session: SessionId) -> None:
        """Kill every mover of the session."""
        for known in [m for m in self._movers.values() if m.session == session]:
            self.kill(known.mover_id)

    def _schedule_leaving(self, mover: Mover) -> None:
        def leave() -> None:
            self._on_leaving(mover)
            self.reconsider(mover.mover_id)

        self._context.before_next_event(("mover-leaves", mover.mover_id), leave)

    def retired(self) -> list[Mover]:
        """Those that are retired and not dead yet."""
        return [mover for mover in self._movers.values() if mover.retired]

    def num_stuck(self, session: SessionId) -> int:
        """How many resident movers of the session were told to end long ago and have not."""
        limit = self._context.now - STUCK_S
        return sum(
            mover.resident and mover.dying and mover.kill_sent_at <= limit
            for mover in self._movers.values()
            if mover.session == session
        )

    def kill(self, mover: MoverId) -> None:
        """Have it killed, once. A resident one may take for ever: its rank does not wait for it."""
        known = self._movers.get(mover)
        if known is None or known.dying:
            return
        known.dying, known.kill_sent_at = True, self._context.now
        self._context.timers.cancel(("retired", mover))
        self._context.emit(KillMover(mover))
        if known.resident:
            self._schedule_leaving(known)

    def load_plan(self, mover: MoverId, plan: Plan) -> None:
        """Make sure that the mover knows the plan."""
        known = self._movers[mover]
        if plan.digest not in known.plans:
            known.plans.add(plan.digest)
            self._context.emit(SendToMover(mover, LoadPlan(digest=plan.digest, encoded=encode_plan(plan))))

    def load_remote(
        self, mover: MoverId, peer: Endpoint, agent: AgentName, metadata: bytes, word: int = 0
    ) -> None:
        """Make sure that the mover has loaded this metadata of the agent; `word`: as in `LoadRemote`.

        Raises PeerError where another peer has named the agent: the library would replace how it is reached.
        """
        known = self._movers[mover]
        if agent not in known.remotes:
            self._drop_stale(known)
        first = known.learnt_from.setdefault(agent, peer)
        if first != peer and metadata not in known.remotes.get(agent, ()):
            raise PeerError(
                f"cannot read from agent {agent} as {peer} describes it: it is an agent of {first}",
                Code.BAD_FRAME,
            )
        known.last_used.pop(agent, None)
        known.last_used[agent] = self._context.now
        if metadata not in known.remotes.get(agent, ()):
            self._make_room(known, peer, _loaded_size(metadata))
            known.remotes.setdefault(agent, set()).add(metadata)
            known.loaded_bytes_of[peer] += _loaded_size(metadata)
            self._context.emit(SendToMover(mover, LoadRemote(agent=agent, metadata=metadata, word=word)))

    def _drop_stale(self, mover: Mover) -> None:
        """Engines restart, and each time with new agents: the old ones must not add up."""
        while mover.last_used:
            agent, last_used = next(iter(mover.last_used.items()))
            if not self._context.is_stale(last_used):
                return
            self.drop_remote(mover.mover_id, agent)
            del mover.last_used[agent], mover.learnt_from[agent]

    def _make_room(self, mover: Mover, peer: Endpoint, num_bytes: int) -> None:
        """Drop agents of that peer, the longest unwanted first. A pull that wants one has it loaded anew."""
        if mover.loaded_bytes_of[peer] + num_bytes <= MAX_LOADED_BYTES_PER_PEER:
            return
        for agent in [agent for agent in mover.last_used if mover.learnt_from[agent] == peer]:
            if mover.loaded_bytes_of[peer] + num_bytes > MAX_LOADED_BYTES_PER_PEER:
                self.drop_remote(mover.mover_id, agent)

    def drop_remote(self, mover: MoverId, agent: AgentName) -> None:
        """What the mover has loaded of the agent is worth nothing: it failed, or is long gone.

        The agent stays that of the peer which named it first: otherwise another one, which has made a read
        fail by an address that is not there, would be the next to describe it.
        """
        known = self._movers.get(mover)
        if known is not None and (loaded := known.remotes.pop(agent, None)) is not None:
            peer = known.learnt_from[agent]
            known.loaded_bytes_of[peer] -= sum(map(_loaded_size, loaded))
            if not known.loaded_bytes_of[peer]:
                del known.loaded_bytes_of[peer]
            self._context.emit(SendToMover(mover, DropRemote(agent=agent)))


def _loaded_size(metadata: bytes) -> int:
    return REMOTE_OVERHEAD_BYTES + len(metadata)
