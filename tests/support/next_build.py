"""The build after this one, as far as another node or engine can tell: it speaks the next protocol versions.

`python -m tests.support.next_build ARGUMENT...` is its `kvxferd`. It runs from the repository.
"""

from __future__ import annotations

from typing import Any

from kvxferd.wire import peer, worker
from kvxferd.wire.common import Versions


def become_next(agent: Any = None) -> None:
    """Make this process one of the next build, before it speaks. `agent`: it serves this test alone."""
    newest = max(peer.PEER_VERSIONS.newest, worker.WORKER_VERSIONS.newest) + 1
    peer.PEER_VERSIONS = worker.WORKER_VERSIONS = Versions(newest, newest)
    if agent is not None:
        agent.can_serve_again = False


if __name__ == "__main__":
    become_next()
    from kvxferd.cli import main  # what it imports has the versions by name

    main()
