"""Who renews the page by its script: a capped number."""

from __future__ import annotations

import time
from collections.abc import Callable

from aiohttp import web

# Each takes one shared response every two seconds: sixteen are 0.4 % of a core.
MAX_WATCHERS = 16
FORGET_S = 10.0
MAX_ID_CHARS = 32


class Watchers:
    """The browsers that renewed the page in the last seconds, by the ids that their scripts chose."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_seen: dict[str, float] = {}

    def admit(self, watcher: str) -> bool:
        """Return whether this one may renew the page now: False while as many others do."""
        now = self._clock()
        watcher = watcher[:MAX_ID_CHARS]
        for other, seen in list(self._last_seen.items()):
            if now - seen > FORGET_S:
                del self._last_seen[other]
        if watcher not in self._last_seen and len(self._last_seen) >= MAX_WATCHERS:
            return False
        self._last_seen[watcher] = now
        return True


WATCHERS: web.AppKey[Watchers] = web.AppKey("watchers", Watchers)
