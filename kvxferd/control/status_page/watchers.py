"""Who renews the page by its script: a capped number."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from aiohttp import web

# Each takes one shared response every two seconds: sixteen are 0.4 % of a core.
MAX_WATCHERS = 16
FORGET_S = 10.0
MAX_ID_CHARS = 32


class Watchers:
    """The browsers that renewed the page in the last seconds, by their sources and the ids they chose.

    While the places are full, a source with fewer takes one of the source that has most: one client with
    many ids keeps nobody else out.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_seen: dict[tuple[str, str], float] = {}

    def admit(self, source: str, watcher: str) -> bool:
        """Return whether this one may renew the page now: False while as many others do."""
        now = self._clock()
        key = (source, watcher[:MAX_ID_CHARS])
        for other, seen in list(self._last_seen.items()):
            if now - seen > FORGET_S:
                del self._last_seen[other]
        if key not in self._last_seen and len(self._last_seen) >= MAX_WATCHERS:
            num_of = Counter(other for other, _ in self._last_seen)
            most, number = num_of.most_common(1)[0]
            if number <= num_of[source] + 1:
                return False
            del self._last_seen[next(each for each in self._last_seen if each[0] == most)]
        self._last_seen[key] = now
        return True


WATCHERS: web.AppKey[Watchers] = web.AppKey("watchers", Watchers)
