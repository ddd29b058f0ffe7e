"""Peers that this node does not admit. Pure: the caller gives the clock."""

from __future__ import annotations

from kvxferd.telemetry.warnings.kinds import WarningKind
from kvxferd.telemetry.warnings.warning_list import WarningCondition

TURNED_AWAY_FOR_S = 60.0


class TurnedAwayPeers:
    """Peers whose key or address was refused in the last minute: another node's pulls fail for it."""

    def __init__(self) -> None:
        self._last: tuple[float, str, str] | None = None

    def record(self, address: str, reason: str, now: float) -> None:
        """Take over a refused connection. Anybody may cause these: only the last one is kept."""
        self._last = now, address, reason

    def findings(self, now: float) -> list[WarningCondition]:
        """Return the one finding. Daemons connect again each few seconds: it lasts while the cause does."""
        if self._last is None or now - self._last[0] > TURNED_AWAY_FOR_S:
            return []
        _, address, reason = self._last
        message = f"this node turns a peer away, and that node's pulls from here fail: {address}, {reason}"
        remedy = (
            "if it is a node of yours, add what is missing here: its key to peer.curve_allowed_keys or to "
            "the file of peer.curve_allowed_keys_file, its address to peer.allowed_addresses: "
            "docs/how-to/keys.md"
        )
        return [WarningCondition(WarningKind.PEER_TURNED_AWAY, "", message, remedy)]
