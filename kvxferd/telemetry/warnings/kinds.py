"""The kinds of warnings: the values of `kvxferd_warnings{kind}`, and the anchors of their remedies."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

# A warning that is not found any more stays for this long, so that one that comes and goes is one warning.
HOLD_S = 10.0


class WarningKind(StrEnum):
    """What is wrong. The values are stable: alerts and scripts name them."""

    PULLS_FAIL = "pulls-fail"
    SAME_NODE_TCP = "same-node-tcp"
    CARD_UNUSED = "card-unused"
    SLOW_PEER = "slow-peer"
    READS_MISPREDICTED = "reads-mispredicted"
    SLOW_FIRST_PULL = "slow-first-pull"
    MOVER_STARVED = "mover-starved"
    MOVER_STOPPED = "mover-stopped"
    MOVER_CRASHES = "mover-crashes"
    TIMERS_LATE = "timers-late"
    LIMIT_REACHED = "limit-reached"
    LOG_LINES_DROPPED = "log-lines-dropped"
    PLACEMENT = "placement"
    PEER_SOCKET_OPEN = "peer-socket-open"
    PEER_TURNED_AWAY = "peer-turned-away"
    ALLOWED_KEYS_UNREAD = "allowed-keys-unread"


class KindFacts(NamedTuple):
    """What holds for every warning of a kind."""

    page: str  # where the documents explain it, with its anchor
    hold_s: float = HOLD_S


_SLOW = "docs/how-to/slow-path.md"
_FAILURE = "docs/how-to/troubleshoot.md"

KINDS: dict[WarningKind, KindFacts] = {
    WarningKind.PULLS_FAIL: KindFacts(f"{_FAILURE}#pulls-fail"),
    WarningKind.SAME_NODE_TCP: KindFacts(f"{_SLOW}#same-node-tcp"),
    WarningKind.CARD_UNUSED: KindFacts(f"{_SLOW}#card-unused"),
    WarningKind.SLOW_PEER: KindFacts(f"{_SLOW}#slow-peer"),
    WarningKind.READS_MISPREDICTED: KindFacts(f"{_SLOW}#reads-mispredicted"),
    WarningKind.SLOW_FIRST_PULL: KindFacts(f"{_SLOW}#slow-first-pull"),
    WarningKind.MOVER_STARVED: KindFacts(f"{_SLOW}#mover-starved"),
    WarningKind.MOVER_STOPPED: KindFacts(f"{_FAILURE}#mover-stopped"),
    WarningKind.MOVER_CRASHES: KindFacts(f"{_FAILURE}#mover-crashes"),
    WarningKind.TIMERS_LATE: KindFacts(f"{_SLOW}#timers-late", hold_s=0.0),  # holds for 300 s by itself
    WarningKind.LIMIT_REACHED: KindFacts(f"{_FAILURE}#limit-reached"),
    WarningKind.LOG_LINES_DROPPED: KindFacts(f"{_FAILURE}#log-lines-dropped"),
    WarningKind.PLACEMENT: KindFacts(f"{_SLOW}#placement"),
    WarningKind.PEER_TURNED_AWAY: KindFacts(f"{_FAILURE}#peer-turned-away"),
    WarningKind.PEER_SOCKET_OPEN: KindFacts(f"{_FAILURE}#peer-socket-open", hold_s=0.0),  # a setting
    WarningKind.ALLOWED_KEYS_UNREAD: KindFacts(f"{_FAILURE}#allowed-keys-unread"),
}
