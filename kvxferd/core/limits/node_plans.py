"""The plans of one node, with a share for each user and, of a user's, for each peer."""

from __future__ import annotations

from collections import Counter

from kvxferd.core.limits.fair_share import FairShare
from kvxferd.plan import PlanCache, PlanOwner

# Of the node's limit, what one user may have of one peer's engines: plans that pulls read by cannot be
# evicted, so else one hostile peer could have all of a user's other pulls refused. The largest plan there may
# be, of 65,536 extents that are all unlike, has 30 MiB of the 40.
OWNER_DIVISOR = 4


class NodePlanCache(PlanCache):
    """Users share the limit as they share every other one.

    A user without room takes it from the users that have more than it has, or else from its own peers that
    have no less than the one it reads: a cached plan costs its owner nothing but the time to make it again.
    """

    def has_room(self, owner: PlanOwner, num_bytes: int) -> bool:
        """Whether the owner may have so many bytes more."""
        if self.bytes_of(owner) + num_bytes > self.max_bytes // OWNER_DIVISOR:
            return False
        return FairShare.from_counts(self.max_bytes, self._bytes_of_users()).has_room(owner.uid, num_bytes)

    def losers(self, owner: PlanOwner, num_bytes: int) -> list[PlanOwner]:
        """Return the owners that lose plans where this one has no room, the first first."""
        of_user, mine = self._bytes_of_users(), self.bytes_of(owner)
        if mine + num_bytes > self.max_bytes // OWNER_DIVISOR:
            return [owner]
        found = [
            other
            for other in self.bytes_by_owner()
            if other == owner
            or (other.uid == owner.uid and self.bytes_of(other) >= mine)
            or of_user[other.uid] > of_user[owner.uid]
        ]
        return sorted(found, key=lambda other: (of_user[other.uid], self.bytes_of(other)), reverse=True)

    def _bytes_of_users(self) -> Counter[int]:
        counts: Counter[int] = Counter()
        for owner, num_bytes in self.bytes_by_owner().items():
            counts[owner.uid] += num_bytes
        return counts
