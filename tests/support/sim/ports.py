"""What every shell of a simulated node does for the core; `kvxferd.core.effects` says when and why."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvxferd.core import effects as fx
from kvxferd.ids import AgentName, Endpoint, MoverId, SessionId
from kvxferd.wire.common import Message


class Ports(ABC):
    """Effects that no shell may do without."""

    @abstractmethod
    def now(self) -> float:
        """Return the time on the node's clock."""

    @abstractmethod
    def send_to_worker(self, effect: fx.SendToWorker) -> None: ...

    @abstractmethod
    def close_worker(self, session: SessionId) -> None: ...

    @abstractmethod
    def overwrite_fence_word(self, session: SessionId, slot: int) -> None: ...

    @abstractmethod
    def fork_mover(self, mover: MoverId, agent: AgentName) -> None: ...

    @abstractmethod
    def kill_mover(self, mover: MoverId) -> None: ...

    @abstractmethod
    def send_to_mover(self, mover: MoverId, message: Message) -> None: ...

    @abstractmethod
    def bind_mover(self, effect: fx.BindMover) -> None: ...

    @abstractmethod
    def share_fence_page(self, mover: MoverId, session: SessionId) -> None: ...

    @abstractmethod
    def send_to_peer(self, endpoint: Endpoint, message: Message) -> None: ...

    @abstractmethod
    def reply_to_peer(self, route: bytes, message: Message) -> None: ...
