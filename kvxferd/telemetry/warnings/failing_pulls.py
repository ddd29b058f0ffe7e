"""Pulls that fail: which share of the last minute's, with the commonest code and peer.

Pure: the caller gives the records and the clock.
"""

from __future__ import annotations

import textwrap
from collections import Counter, deque
from typing import NamedTuple

from kvxferd.core.snapshot import PullRecord
from kvxferd.errors import Code
from kvxferd.telemetry.warnings.kinds import WarningKind
from kvxferd.telemetry.warnings.warning_list import Finding
from kvxferd.wire.endpoint import address_of

WINDOW_S = 60.0
# One failed pull of a quiet minute is a reason to look; of a busy one, three in a hundred thousand are not.
MIN_SHARE = 0.01
# Lower than MIN_SHARE, so that a share that moves about it is one warning.
CLEAR_SHARE = 0.005
# Of one second: codes and peers are few, but a peer's name may be new each time.
MAX_REASONS = 64

# The last error's own message, which `kvxferd history --failed` has whole.
MAX_MESSAGE_CHARS = 160

_PING = (
    "run `kvxferd ping {endpoint}`: it tells a daemon that is down, a network that drops, and a key or an "
    "address that is not admitted there"
)
# What to do about the commonest code. Other codes: see the message.
REMEDIES = {
    Code.PEER_UNREACHABLE: _PING,
    Code.DEADLINE: (
        "look at the node there: a process may be stopped, or the network hang; `kvxferd peers` here shows "
        "whether it answers"
    ),
    Code.RELEASED: (
        "the source took its blocks back too early, and the message has why: `lease-expired` needs a longer "
        "transfer.lease_s there or an earlier pull, any other reason a look at that engine"
    ),
    Code.LEASE_EXPIRED: (
        "the pull came after its lease: raise transfer.lease_s at the source, or let decode pull sooner"
    ),
    Code.BUSY: "a limit is reached, and the message names it: docs/how-to/when-something-is-wrong.md",
    Code.NOT_ALLOWED: "add this node's key or address to the allow-lists there: docs/how-to/keys.md",
    Code.MOVER_LOST: "movers die here: look for `mover died` in this log and in the kernel's",
    Code.SOURCE_STALLED: "look at the source node: a process may be stopped, or the network hang",
    Code.TRANSFER_UNKNOWN: (
        "the source has no such transfer: its publish was refused there (`kvxferd status` on that node), it "
        "was released, or the daemon restarted and the router's references are old"
    ),
    Code.TRANSPORT: "the message has the transport's own text: run `kvxferd doctor` here and there",
}
DEFAULT_REMEDY = (
    "`kvxferd transfers` shows each message; docs/how-to/when-something-is-wrong.md lists the codes"
)


class _Reason(NamedTuple):
    code: Code
    where: str  # the source engine, with its daemon where that is known
    endpoint: str = ""  # of that daemon, where it did not reply, and not one of its ranks


class _Second:
    """The pulls that ended in one second."""

    __slots__ = ("num_ended", "reasons", "second")

    def __init__(self, second: int) -> None:
        self.second = second
        self.num_ended = 0
        self.reasons: Counter[_Reason] = Counter()


class FailingPulls:
    """Counts the pulls of the last `WINDOW_S`; those that were cancelled do not count."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque()
        self._is_warning = False
        self._last_message = ""

    def record(self, record: PullRecord, now: float) -> None:
        """Count a pull that ended."""
        if record.outcome == "cancelled":
            return
        second = self._second_of(now)
        second.num_ended += 1
        if record.code is None:
            return
        address = address_of(record.peer)
        is_silent = record.silent == address or record.code is Code.PEER_UNREACHABLE
        reason = _Reason(record.code, _where(record), address if is_silent else "")
        if reason not in second.reasons and len(second.reasons) >= MAX_REASONS:
            reason = _Reason(record.code, "")
        second.reasons[reason] += 1
        self._last_message = record.message

    def findings(self, now: float) -> list[Finding]:
        """Return the one finding, while the share of failed pulls is too large."""
        self._forget(now)
        reasons: Counter[_Reason] = Counter()
        for second in self._seconds:
            reasons.update(second.reasons)
        num_failed, num_ended = reasons.total(), sum(second.num_ended for second in self._seconds)
        limit = CLEAR_SHARE if self._is_warning else MIN_SHARE
        self._is_warning = num_failed > 0 and num_failed >= limit * num_ended
        if not self._is_warning:
            return []
        return [_finding(reasons, num_failed, num_ended, self._last_message)]

    def _second_of(self, now: float) -> _Second:
        second = int(now)
        if not self._seconds or self._seconds[-1].second != second:
            self._forget(now)
            self._seconds.append(_Second(second))
        return self._seconds[-1]

    def _forget(self, now: float) -> None:
        while self._seconds and self._seconds[0].second <= now - WINDOW_S:
            self._seconds.popleft()


def _finding(reasons: Counter[_Reason], num_failed: int, num_ended: int, last_message: str) -> Finding:
    (reason, num_of_reason), *_ = reasons.most_common(1)
    by_code: Counter[Code] = Counter()
    for each, count in reasons.items():
        by_code[each.code] += count
    others = ", ".join(f"{n} {code.value}" for code, n in by_code.most_common(4) if code != reason.code)
    some = "all" if num_of_reason == num_failed else f"{num_of_reason} of them"
    where = f" from {reason.where}" if reason.where else ""
    message = (
        f"pulls fail: {num_failed} of {num_ended} in the last minute, {some} with {reason.code.value}{where}"
        + (f"; others: {others}" if others else "")
        + f'. The last: "{textwrap.shorten(last_message, MAX_MESSAGE_CHARS, placeholder=" ...")}"'
    )
    remedy = _PING if reason.endpoint else REMEDIES.get(reason.code, DEFAULT_REMEDY)
    remedy = remedy.format(endpoint=reason.endpoint or "ENDPOINT")
    return Finding(WarningKind.PULLS_FAIL, "", message, remedy)


def _where(record: PullRecord) -> str:
    address = address_of(record.peer)
    where = f"{record.source} at {address}" if address else str(record.source)
    if record.silent and record.silent == address:
        return f"{where}, which did not reply"
    return f"{where}, and {record.silent} did not reply" if record.silent else where
