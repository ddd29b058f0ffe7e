"""Remote agents that a mover has loaded, their reads, and when it is safe to drop or reload one."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable

from kvxferd.ids import AgentName
from kvxferd.mover.transport.base import HOST, ReadHandle, ReadKinds, TransportError
from kvxferd.mover.transport.staging import StagedRead, StagedTransport
from kvxferd.plan import Runs

_LOG = logging.getLogger(__name__)


class RemoteAgents:
    """Loads, drops and repairs remote agents. None is forgotten while a pull needs it.

    A lost connection to a living agent stays dead in the library until the agent is dropped and
    loaded again. That is done here, from the kept metadata, before the next read from it.
    """

    def __init__(self, transport: StagedTransport) -> None:
        self._transport = transport
        self._metadata: dict[AgentName, list[bytes]] = {}
        self._needed: Counter[AgentName] = Counter()  # by how many pulls
        self._unwanted: set[AgentName] = set()  # to be dropped once no pull needs them
        self._in_flight: defaultdict[AgentName, int] = defaultdict(int)
        self._stale: set[AgentName] = set()  # to be loaded anew once no read is in flight
        self._load_errors: dict[AgentName, str] = {}

    def load(self, agent: AgentName, metadata: bytes) -> None:
        """Load an agent, or more of its memory. `post` reports what went wrong."""
        known = self._metadata.setdefault(agent, [])
        if agent in self._unwanted:
            self._unwanted.discard(agent)
            known.clear()  # as if it had been dropped
            self._forget_load_error(agent)
        if metadata in known:
            return
        known.append(metadata)
        if agent not in self._stale:
            self._load_one(agent, metadata)

    def acquire(self, agents: Iterable[AgentName]) -> None:
        """Keep agents loaded for a pull, which may post its reads later."""
        self._needed.update(agents)

    def release(self, agents: Iterable[AgentName]) -> list[AgentName]:
        """Keep agents for that pull no longer; return those that are forgotten with it."""
        self._needed.subtract(agents)
        unneeded = [agent for agent in agents if not self._needed[agent]]
        for agent in unneeded:
            del self._needed[agent]
        return [agent for agent in unneeded if agent in self._unwanted and self.drop(agent)]

    def drop(self, agent: AgentName) -> bool:
        """Forget an agent, and return True; while a pull needs it, only once none does.

        Where it is loaded again before, it is not forgotten.
        """
        if agent in self._needed:
            self._unwanted.add(agent)
            return False
        self._unwanted.discard(agent)
        if self._metadata.pop(agent, None) is not None:
            self._forget_load_error(agent)
            self._drop_if_idle(agent)
        return True

    def _forget_load_error(self, agent: AgentName) -> None:
        """The metadata that could not be loaded are not those of the agent any more."""
        if self._load_errors.pop(agent, None) is not None:
            self._stale.discard(agent)

    def can_stage(self, agent: AgentName) -> bool:
        """As `StagedTransport.can_stage`."""
        return self._transport.can_stage(agent)

    def post(self, agent: AgentName, runs: Runs, kinds: ReadKinds = HOST) -> ReadHandle:
        """Post a read as `Transport.post` does. One that is not done is to be polled until it is over.

        Raises TransportError, and nothing else: what no transport should raise proves nothing.
        """
        if problem := self._ensure_loaded(agent):
            raise TransportError(problem, settled=True)
        self._in_flight[agent] += 1
        try:
            handle = self._transport.post(agent, runs, kinds)
        except Exception as error:
            raise self._read_failed(agent, error) from None
        if handle.done:
            self._read_done(agent, handle)
        return handle

    def poll(self, agent: AgentName, handle: ReadHandle) -> bool:
        """Return whether a read is done, whose handle is then released. Raises as `post`, once."""
        try:
            if not self._transport.poll(handle):
                return False
        except Exception as error:
            raise self._read_failed(agent, error) from None
        self._read_done(agent, handle)
        return True

    @staticmethod
    def cancel(handle: ReadHandle | None) -> None:
        """Post nothing more of a read that is posted in parts."""
        if isinstance(handle, StagedRead):
            handle.cancel()

    def _ensure_loaded(self, agent: AgentName) -> str:
        """Load the agent again if need be; return why it cannot be read, "" if it can."""
        if agent not in self._metadata:
            return f"cannot read from agent {agent}: it is not known here"
        if agent in self._stale:
            if not self._drop_if_idle(agent):
                return f"cannot read from agent {agent}: its connection is lost"
            for metadata in self._metadata[agent]:
                self._load_one(agent, metadata)
        return self._load_errors.get(agent, "")

    def _read_done(self, agent: AgentName, handle: ReadHandle) -> None:
        self._transport.release(handle)
        self._read_ended(agent)

    def _read_failed(self, agent: AgentName, error: Exception) -> TransportError:
        """Return what a failed read proves."""
        if not isinstance(error, TransportError):
            _LOG.error("transport failed unexpectedly: agent=%s", agent, exc_info=error)
            error = TransportError(repr(error), settled=False)
        if error.lost:
            self._stale.add(agent)
        self._read_ended(agent)
        return error

    def _read_ended(self, agent: AgentName) -> None:
        self._in_flight[agent] -= 1
        if not self._in_flight[agent]:
            del self._in_flight[agent]
            if agent not in self._metadata:
                self._drop_if_idle(agent)

    def _drop_if_idle(self, agent: AgentName) -> bool:
        if agent in self._in_flight:
            return False
        self._stale.discard(agent)
        self._load_errors.pop(agent, None)
        try:
            self._transport.drop_remote(agent)
        except TransportError as error:
            _LOG.warning("agent not dropped: agent=%s reason=%s", agent, error.message)
        return True

    def _load_one(self, agent: AgentName, metadata: bytes) -> None:
        try:
            name = self._transport.load_remote(metadata, agent)
        except TransportError as error:
            self._load_errors[agent] = error.message
            # The peer may be back later: the next read tries again.
            self._stale.add(agent)
            return
        if name != agent:
            self._load_errors[agent] = f"cannot load agent {agent}: its metadata is that of {name}"
            if name not in self._metadata:
                self._transport.drop_remote(name)
