"""What an episode tells whoever measures it. Nothing here changes an episode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxferd.client import events as ce
from kvxferd.wire.common import Message

if TYPE_CHECKING:
    from tests.property.simulation.daemon import Daemon
    from tests.property.simulation.engine import Engine, Transfer
    from tests.property.simulation.process import Process


class Watcher:
    """Sees nothing; a measurement overrides what it needs."""

    def daemon_started(self, daemon: Daemon) -> None:
        """A node's daemon was made, and has not run yet."""

    def published(self, engine: Engine, transfer: Transfer) -> None:
        """An engine has called `publish`."""

    def withdrawn(self, engine: Engine, transfer: Transfer) -> None:
        """An engine has called `unpublish`."""

    def connecting(self, process: Process) -> None:
        """A process tries to connect to its node's daemon."""

    def sent_to_daemon(self, process: Process, message: Message) -> None:
        """A process has sent a message to its node's daemon."""

    def posted(self, source: str, target: str, message: Message) -> None:
        """A node's daemon has sent a message to another node's."""

    def handled(self, process: Process, event: ce.Event) -> None:
        """An engine is about to handle an event of a session."""
