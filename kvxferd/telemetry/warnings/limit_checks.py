"""Limits that are used up, and lines that the log lost. Pure: the caller reads the numbers and the clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvxferd.telemetry.warnings.kinds import WarningKind
from kvxferd.telemetry.warnings.warning_list import Finding

NEAR_SHARE = 0.9
CLEAR_SHARE = 0.8
DROPPED_FOR_S = 60.0
TURNED_AWAY_FOR_S = 60.0


class LimitUse(NamedTuple):
    """How much of a limit is used. `where`: by whom, where each engine or rank has the limit by itself."""

    setting: str  # "limits.max_sessions"
    used: int
    limit: int
    where: str = ""


class NearLimits:
    """The limits that are used up, or nearly."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def findings(self, uses: Iterable[LimitUse]) -> list[Finding]:
        """Return one finding for each such limit."""
        found = []
        for use in uses:
            share = CLEAR_SHARE if use.setting in self._warned else NEAR_SHARE
            if use.limit <= 0 or use.used < share * use.limit:
                self._warned.discard(use.setting)
                continue
            self._warned.add(use.setting)
            found.append(_near(use))
        return found


class DroppedLines:
    """Whether the log has lost lines in the last minute."""

    def __init__(self, dropped: int = 0) -> None:
        self._dropped = dropped
        self._first = dropped  # before the present episode
        self._last_at: float | None = None

    def findings(self, dropped: int, now: float) -> list[Finding]:
        """Return the one finding. `dropped`: how many lines the process has lost so far."""
        if self._last_at is not None and now - self._last_at > DROPPED_FOR_S:
            self._last_at = None
            self._first = self._dropped
        if dropped > self._dropped:
            self._dropped, self._last_at = dropped, now
        if self._last_at is None:
            return []
        num_lost = dropped - self._first
        message = f"the log loses lines: {num_lost} since this began, standard error does not take them"
        remedy = (
            "look at what reads it: journald, a container's log driver, a pipe's reader, or a full disk; "
            "pulls do not wait for it"
        )
        return [Finding(WarningKind.LOG_LINES_DROPPED, "", message, remedy)]


class TurnedAwayPeers:
    """Peers whose key or address was refused in the last minute: another node's pulls fail for it."""

    def __init__(self) -> None:
        self._last: tuple[float, str, str] | None = None

    def record(self, address: str, reason: str, now: float) -> None:
        """Take over a refused connection. Anybody may cause these: only the last one is kept."""
        self._last = now, address, reason

    def findings(self, now: float) -> list[Finding]:
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
        return [Finding(WarningKind.PEER_TURNED_AWAY, "", message, remedy)]


def _near(use: LimitUse) -> Finding:
    where = f" by {use.where}" if use.where else ""
    what = "is used up" if use.used >= use.limit else "is nearly used up"
    message = f"{use.setting} = {use.limit} {what}{where}: {use.used}, and what is beyond it is refused"
    return Finding(
        WarningKind.LIMIT_REACHED,
        use.setting,
        message,
        "see who uses it, or raise it: docs/how-to/when-something-is-wrong.md",
    )
