"""Source movers must poll while somebody reads from them: who asked, and who confirmed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from kvxferd.core.moment import Moment
from kvxferd.ids import AgentName


@dataclass(slots=True)
class _Attendant:
    """One agent that was asked to poll."""

    holders: set[Hashable] = field(default_factory=set)
    confirmed: bool = False
    asked: bool = False


class Attendance:
    """Keeps each mover polling from its first holder until a while after its last."""

    def __init__(self, moment: Moment, ask: Callable[[AgentName, bool], None]) -> None:
        self._moment = moment
        self._ask = ask  # tells the agent's mover, here or on a member's node
        self._attendants: dict[AgentName, _Attendant] = {}

    def attend(self, agent: AgentName, holder: Hashable) -> None:
        """Have the agent poll for this holder. `is_attending` says when it does."""
        attendant = self._attendants.get(agent)
        if attendant is None:
            attendant = self._attendants[agent] = _Attendant()
        if not attendant.asked:
            attendant.asked = True
            self._ask(agent, True)
        attendant.holders.add(holder)
        self._moment.timers.stop(("attend-linger", agent))

    def is_attending(self, agent: AgentName) -> bool:
        """Whether the agent's mover has confirmed that it polls."""
        attendant = self._attendants.get(agent)
        return attendant is not None and attendant.confirmed

    def is_held(self, agent: AgentName) -> bool:
        """Whether somebody reads from the agent, or may."""
        attendant = self._attendants.get(agent)
        return attendant is not None and bool(attendant.holders)

    def confirmed(self, agent: AgentName) -> bool:
        """The agent's mover polls. Return whether that is news."""
        attendant = self._attendants.get(agent)
        if attendant is None or attendant.confirmed:
            return False
        attendant.confirmed = True
        return True

    def refused(self, agent: AgentName) -> None:
        """The agent's mover could not be asked: the next holder asks again."""
        if attendant := self._attendants.get(agent):
            attendant.asked = attendant.confirmed

    def leave(self, agent: AgentName, holder: Hashable) -> None:
        """This holder reads no more. The last one to leave lets the mover rest, after a while."""
        attendant = self._attendants.get(agent)
        if attendant is None or holder not in attendant.holders:
            return
        attendant.holders.discard(holder)
        if not attendant.holders:
            self._moment.after(
                ("attend-linger", agent), self._moment.settings.attend_linger_s, lambda: self._rest(agent)
            )

    def _rest(self, agent: AgentName) -> None:
        del self._attendants[agent]
        self._ask(agent, False)

    def forget(self, agent: AgentName) -> None:
        """The agent is gone."""
        self._attendants.pop(agent, None)
        self._moment.timers.stop(("attend-linger", agent))
