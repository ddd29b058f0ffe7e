"""The kinds of warnings: the values of `kvxferd_warnings{kind}`, and the anchors of their remedies."""

from __future__ import annotations

from enum import StrEnum

# A warning that is not found any more stays for this long, so that one that comes and goes is one warning.
HOLD_S = 10.0


class WarningKind(StrEnum):
    """What is wrong: a state of this node, which the daemon knows exactly."""

    SAME_NODE_TCP = "same-node-tcp"
    CARD_UNUSED = "card-unused"
    TIMERS_LATE = "timers-late"
    PLACEMENT = "placement"
    PEER_SOCKET_OPEN = "peer-socket-open"
    PEER_TURNED_AWAY = "peer-turned-away"
    ALLOWED_KEYS_UNREAD = "allowed-keys-unread"

    @property
    def page(self) -> str:
        """Where the documents explain it, with its anchor."""
        return f"docs/how-to/when-something-is-wrong.md#{self.value}"

    @property
    def hold_s(self) -> float:
        """For how long such a warning stays after it was found last."""
        # Late timers hold for 300 s by themselves; the open socket is a setting.
        return 0.0 if self in (WarningKind.TIMERS_LATE, WarningKind.PEER_SOCKET_OPEN) else HOLD_S
