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


_PAGE = "docs/how-to/when-something-is-wrong.md"

KINDS: dict[WarningKind, KindFacts] = {
    WarningKind.PULLS_FAIL: KindFacts(f"{_PAGE}#pulls-fail"),
    WarningKind.SAME_NODE_TCP: KindFacts(f"{_PAGE}#same-node-tcp"),
    WarningKind.CARD_UNUSED: KindFacts(f"{_PAGE}#card-unused"),
    WarningKind.SLOW_PEER: KindFacts(f"{_PAGE}#slow-peer"),
    WarningKind.READS_MISPREDICTED: KindFacts(f"{_PAGE}#reads-mispredicted"),
    WarningKind.SLOW_FIRST_PULL: KindFacts(f"{_PAGE}#slow-first-pull"),
    WarningKind.MOVER_STARVED: KindFacts(f"{_PAGE}#mover-starved"),
    WarningKind.MOVER_STOPPED: KindFacts(f"{_PAGE}#mover-stopped"),
    WarningKind.MOVER_CRASHES: KindFacts(f"{_PAGE}#mover-crashes"),
    WarningKind.TIMERS_LATE: KindFacts(f"{_PAGE}#timers-late", hold_s=0.0),  # holds for 300 s by itself
    WarningKind.LIMIT_REACHED: KindFacts(f"{_PAGE}#limit-reached"),
    WarningKind.LOG_LINES_DROPPED: KindFacts(f"{_PAGE}#log-lines-dropped"),
    WarningKind.PLACEMENT: KindFacts(f"{_PAGE}#placement"),
    WarningKind.PEER_TURNED_AWAY: KindFacts(f"{_PAGE}#peer-turned-away"),
    WarningKind.PEER_SOCKET_OPEN: KindFacts(f"{_PAGE}#peer-socket-open", hold_s=0.0),  # a setting
    WarningKind.ALLOWED_KEYS_UNREAD: KindFacts(f"{_PAGE}#allowed-keys-unread"),
}
