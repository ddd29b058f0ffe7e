"""How often each user may do what is dear: some at once, and then so many a second."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Bucket:
    left: float
    at: float


class Rate:
    """A token bucket of each user. One that is full again is forgotten."""

    def __init__(self, burst: int, per_s: float) -> None:
        self.burst, self.per_s = burst, per_s
        self._buckets: dict[int, _Bucket] = {}
        self._swept = 0.0

    def take(self, uid: int, now: float) -> float:
        """Take one where there is one, and return 0; else return how many seconds until there is."""
        self._sweep(now)
        bucket = self._buckets.setdefault(uid, _Bucket(self.burst, now))
        bucket.left = min(self.burst, bucket.left + (now - bucket.at) * self.per_s)
        bucket.at = now
        if bucket.left < 1:
            return (1 - bucket.left) / self.per_s
        bucket.left -= 1
        return 0.0

    def _sweep(self, now: float) -> None:
        full_s = self.burst / self.per_s
        if now - self._swept >= full_s:
            self._swept = now
            self._buckets = {uid: one for uid, one in self._buckets.items() if now - one.at < full_s}
