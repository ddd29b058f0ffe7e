"""Source movers must poll while peers read from them: which were requested to, and which have confirmed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from kvxferd.core.context import NodeContext
from kvxferd.ids import AgentName


@dataclass(slots=True)
class _PollState:
    """One agent that was requested to poll."""

    holders: set[Hashable] = field(default_factory=set)
    confirmed: bool = False
    requested: bool = False


class PollRequests:
    """Keeps each mover polling from its first holder until `polling_linger_s` after its last."""

    def __init__(self, context: NodeContext, request_polling: Callable[[AgentName, bool], None]) -> None:
        self._context = context
        self._request_polling = request_polling  # sends to the agent's mover, here or on a member's node
        self._states: dict[AgentName, _PollState] = {}

    def acquire(self, agent: AgentName, holder: Hashable) -> None:
        """Have the agent poll for this holder. `is_polling` returns whether it does."""
        state = self._states.setdefault(agent, _PollState())
        if not state.requested:
            state.requested = True
            self._request_polling(agent, True)
        state.holders.add(holder)
        self._context.timers.cancel(("polling-linger", agent))

    def is_requested(self, agent: AgentName) -> bool:
        """Whether the agent's mover is to poll, or was asked to and may still do so."""
        return agent in self._states

    def is_polling(self, agent: AgentName) -> bool:
        """Whether the agent's mover has confirmed that it polls."""
        state = self._states.get(agent)
        return state is not None and state.confirmed

    def has_holders(self, agent: AgentName) -> bool:
        """Whether a grant, or a home, needs the agent to poll."""
        state = self._states.get(agent)
        return state is not None and bool(state.holders)

    def confirm(self, agent: AgentName) -> bool:
        """Record that the agent's mover polls. Return whether anything changed."""
        state = self._states.get(agent)
        if state is None or state.confirmed:
            return False
        state.confirmed = True
        return True

    def request_failed(self, agent: AgentName) -> None:
        """Record that the agent's mover could not be reached: the next holder's request is sent again."""
        if state := self._states.get(agent):
            state.requested = state.confirmed

    def release(self, agent: AgentName, holder: Hashable) -> None:
        """Remove the holder. After the last one the mover may stop polling, `polling_linger_s` later."""
        state = self._states.get(agent)
        if state is None or holder not in state.holders:
            return
        state.holders.discard(holder)
        if not state.holders:
            self._context.after(
                ("polling-linger", agent),
                self._context.settings.polling_linger_s,
                lambda: self._stop_polling(agent),
            )

    def _stop_polling(self, agent: AgentName) -> None:
        del self._states[agent]
        self._request_polling(agent, False)

    def check_integrity(self) -> None:
        """Raise AssertionError where a mover that is needed is to stop."""
        for agent, state in self._states.items():
            lingers = ("polling-linger", agent) in self._context.timers
            assert not (state.holders and lingers), f"{agent} is to stop polling under {state.holders}"

    def forget(self, agent: AgentName) -> None:
        """Forget an agent whose mover is gone."""
        self._states.pop(agent, None)
        self._context.timers.cancel(("polling-linger", agent))
