"""Which daemon may act for a rank that it has joined at the rank's home."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

KEY_HOLDER, SECRET_HOLDER = "key:", "secret:"


@dataclass(frozen=True, slots=True)
class MemberIdentity:
    """Identifies a member's daemon: by the CURVE key that it proved to hold or, without CURVE, by its secret.

    A secret crosses the network in the clear. It distinguishes two daemons that were given one rank by
    mistake. It does not stop an attacker who listens or who joins the rank first. A route changes on
    reconnect, and a boot is part of every agent's name, so neither identifies a sender.
    """

    key: str  # "": without CURVE
    secret: str

    @property
    def holder(self) -> str:
        """Return its name in `RankHolders`: its key, or a hash of its secret."""
        if self.key:
            return KEY_HOLDER + self.key
        return SECRET_HOLDER + hashlib.blake2b(self.secret.encode(), digest_size=16).hexdigest()

    def may_act_for(self, owner: MemberIdentity) -> bool:
        """Whether both are one daemon. A restart changes the secret, so a key counts alone."""
        if self.key or owner.key:
            return self.key == owner.key
        return self.secret == owner.secret
