"""A rate limit for each user: a burst at once, then a number per second."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Bucket:
    tokens: float
    updated_at: float


class RateLimiter:
    """A token bucket for each user. A bucket that is full again is forgotten."""

    def __init__(self, burst: int, per_s: float) -> None:
        self.burst, self.per_s = burst, per_s
        self._buckets: dict[int, _Bucket] = {}
        self._swept_at = 0.0

    def acquire(self, uid: int, now: float) -> float:
        """Take a token and return 0, or return how many seconds it takes until there is one."""
        self._sweep(now)
        bucket = self._buckets.setdefault(uid, _Bucket(self.burst, now))
        bucket.tokens = min(self.burst, bucket.tokens + (now - bucket.updated_at) * self.per_s)
        bucket.updated_at = now
        if bucket.tokens < 1:
            return (1 - bucket.tokens) / self.per_s
        bucket.tokens -= 1
        return 0.0

    def _sweep(self, now: float) -> None:
        full_s = self.burst / self.per_s
        if now - self._swept_at >= full_s:
            self._swept_at = now
            self._buckets = {uid: one for uid, one in self._buckets.items() if now - one.updated_at < full_s}
