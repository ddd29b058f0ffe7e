"""Which daemon may speak for a rank that it has joined at the rank's home."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

KEY_HOLDER, SECRET_HOLDER = "key:", "secret:"


@dataclass(frozen=True, slots=True)
class MemberIdentity:
    """What a member is known by: the CURVE key that it proved to hold or, without CURVE, its secret.

    A secret crosses the network in the clear. It tells two daemons apart that were given one rank by
    mistake; it holds off nobody who listens or who joins the rank first. Routes change on reconnect, and a
    boot is in the name of every agent, so neither says who speaks.
    """

    key: str = ""
    secret: str = ""

    @property
    def is_unknown(self) -> bool:
        """Whether nothing tells this member from another: a daemon of peer version 1, without CURVE."""
        return not self.key and not self.secret

    @property
    def holder(self) -> str:
        """Who this is in `RankHolders`: a public key, or a hash of the secret; "" where it is unknown."""
        if self.key:
            return KEY_HOLDER + self.key
        if self.secret:
            return SECRET_HOLDER + hashlib.blake2b(self.secret.encode(), digest_size=16).hexdigest()
        return ""

    def is_same(self, other: MemberIdentity) -> bool:
        """Whether both are certainly one daemon. A key counts alone: a restarted daemon has a new secret."""
        if self.key or other.key:
            return self.key == other.key
        return bool(self.secret) and self.secret == other.secret

    def may_act_for(self, owner: MemberIdentity) -> bool:
        """Whether what this one sends about a rank of that owner counts."""
        return self.is_same(owner) or (self.is_unknown and owner.is_unknown)


UNKNOWN_MEMBER = MemberIdentity()
