"""A rate limit for each user: a burst at once, then a number per second."""

from __future__ import annotations

EXACT_S = 1e-9  # a shorter wait is the rounding of sums


class RateLimiter:
    """A token bucket for each user. A bucket that is full again is forgotten."""

    def __init__(self, burst: int, per_s: float) -> None:
        self.burst, self.per_s = burst, per_s
        self._full_at: dict[int, float] = {}  # when each user's bucket is full again

    def acquire(self, uid: int, now: float) -> float:
        """Take a token and return 0, or return how many seconds it takes until there is one."""
        self._full_at = {user: at for user, at in self._full_at.items() if at > now}
        full_at = self._full_at.get(uid, now)
        wait_s = full_at - now - (self.burst - 1) / self.per_s
        if wait_s > EXACT_S:
            return wait_s
        self._full_at[uid] = full_at + 1 / self.per_s
        return 0.0
