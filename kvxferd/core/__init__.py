"""The pure core: what a node decides. No I/O; time is an argument.

`Node.feed(event, now)` returns effects, `Node.next_deadline()` says when to feed a `Tick`, and
`Node.check_integrity()` holds the invariants that tests check after every step.

Its rooms, each above the next: `views`, `source` and `sink`, `ranks`, `peers`, `limits`. `node` takes the
events in and calls them; `worker_requests` is what a session asks about transfers.
"""

from kvxferd.core.node import Node
from kvxferd.core.settings import Settings

__all__ = ["Node", "Settings"]
