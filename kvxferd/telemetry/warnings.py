"""What an operator should fix although the node works: found by the daemon itself, and logged once.

A warning is a state that the daemon knows exactly, and needs no Prometheus. Rates, shares and limits are for
alerts and for the verdict of `kvxferd status`. A warning does not make a node unready: its pulls from other
peers still work.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import msgspec
import structlog

log = structlog.get_logger()

# A warning that is not found any more stays for this long, so that one that comes and goes is one warning.
HOLD_S = 10.0
# A reader renews what is older. Anybody may read `/readyz` in a loop, and the checks look at every rank.
MAX_AGE_S = 0.1
# Of one kind, as reasons of a placement have no limit; the first that were found stay.
MAX_WARNINGS_PER_KIND = 16
MAX_SUBJECT_CHARS = 200
# A placement's warning names four ranks beside a reason of the library.
MAX_TEXT_CHARS = 2_000


class WarningKind(StrEnum):
    """What is wrong. Also the values of `kvxferd_warnings{kind}`, and the anchors of the remedies."""

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


class WarningCondition(NamedTuple):
    """What a check has found now. `subject` tells it from others of its kind."""

    kind: WarningKind
    subject: str
    message: str
    remedy: str = ""


Check = Callable[[], Iterable[WarningCondition]]


def finding_of(kind: WarningKind, subject: str, sentence: str) -> WarningCondition:
    """Return the finding of a sentence of this package, whose remedy follows its first semicolon."""
    message, _, remedy = sentence.partition("; ")
    return WarningCondition(kind, subject, message, remedy)


class NodeWarning(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to fix, as `/readyz` and `/v1/status` list it under `active_warnings`."""

    kind: WarningKind
    subject: str  # which cause or placement; "": the node
    since: float  # Unix time at which it was found first
    message: str  # what is wrong, and where
    remedy: str  # what to do; "": the message has it
    page: str  # of the documents, with its anchor

    @property
    def text(self) -> str:
        """Return message and remedy as one sentence."""
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


@dataclass(slots=True)
class _Active:
    warning: NodeWarning
    began: float
    found_at: float


class Warnings:
    """The current warnings of one node, in the order in which they began.

    `checks` find them. Each that begins or ends is a line of the log.
    """

    def __init__(
        self,
        checks: Iterable[Check],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._checks = tuple(checks)
        self._clock = clock
        self._wall_clock = wall_clock
        self._active: dict[tuple[WarningKind, str], _Active] = {}
        self._renewed_at = float("-inf")

    def renew(self, max_age_s: float = 0.0, *, is_logged: bool = True) -> None:
        """Take over what every check finds now, unless that is newer than `max_age_s`."""
        now = self._clock()
        if now - self._renewed_at < max_age_s:
            return
        self._renewed_at = now
        for check in self._checks:
            for finding in _run(check):
                self._add(_printable(finding), now, is_logged)
        for key, active in list(self._active.items()):
            missing_s = now - active.found_at
            if missing_s > 0 and missing_s >= active.warning.kind.hold_s:
                del self._active[key]
                if is_logged:
                    _log_end(active.warning, now - active.began)

    def current(self) -> list[NodeWarning]:
        """Return the warnings of now, oldest first."""
        self.renew(MAX_AGE_S)
        return [active.warning for active in self._active.values()]

    def counts(self) -> Counter[WarningKind]:
        """Return how many warnings of each kind there were at the last renewal."""
        return Counter(kind for kind, _ in self._active)

    def _add(self, finding: WarningCondition, now: float, is_logged: bool) -> None:
        """Renew the warning of a finding, or begin one if there is room."""
        key = finding.kind, finding.subject
        active = self._active.get(key)
        if active is not None:
            active.found_at = now
            old = active.warning
            if (finding.message, finding.remedy) != (old.message, old.remedy):
                active.warning = msgspec.structs.replace(old, message=finding.message, remedy=finding.remedy)
        elif self.counts()[finding.kind] < MAX_WARNINGS_PER_KIND:
            since = self._wall_clock()
            warning = NodeWarning(since=since, page=finding.kind.page, **finding._asdict())
            self._active[key] = _Active(warning, now, now)
            if is_logged:
                _log_beginning(warning)


def _run(check: Check) -> list[WarningCondition]:
    try:
        return list(check())
    except Exception:  # a bug of one check: the others go on, and readiness is still reported
        log.exception("warning check failed")
        return []


def _printable(finding: WarningCondition) -> WarningCondition:
    """Return the finding without control characters and of bounded length: names in it are of others."""
    return WarningCondition(
        finding.kind,
        _clean(finding.subject, MAX_SUBJECT_CHARS),
        _clean(finding.message, MAX_TEXT_CHARS),
        _clean(finding.remedy, MAX_TEXT_CHARS),
    )


def _clean(text: str, max_chars: int) -> str:
    if len(text) > max_chars:
        text = text[: max_chars - 3] + "..."
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _log_beginning(warning: NodeWarning) -> None:
    kind = warning.kind.value
    log.warning(
        "warning began",
        limit_by=kind,
        kind=kind,
        subject=warning.subject,
        text=warning.text,
        page=warning.page,
    )


def _log_end(warning: NodeWarning, lasted_s: float) -> None:
    kind = warning.kind.value
    log.info("warning ended", limit_by=kind, kind=kind, subject=warning.subject, lasted_s=round(lasted_s, 1))
