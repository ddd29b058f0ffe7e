"""What an operator should fix although the node works: found by the daemon itself, and logged once.

A warning is a state that the daemon knows exactly, and needs no Prometheus. Rates, shares and limits are for
alerts and for the verdict of `kvxferd status`. A warning does not make a node unready: its pulls from other
peers still work.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from enum import StrEnum

import msgspec
import structlog

log = structlog.get_logger()

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


class NodeWarning(msgspec.Struct, frozen=True):
    """One thing to fix, as a check finds it, and as `/readyz` and `/v1/status` list it."""

    kind: WarningKind
    subject: str  # tells it from others of its kind: which cause or placement; "": the node
    message: str  # what is wrong, and where
    remedy: str = ""  # what to do; "": the message has it
    since: float = 0.0  # Unix time at which it was found first

    @property
    def text(self) -> str:
        """Return message and remedy as one sentence."""
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


Check = Callable[[], Iterable[NodeWarning]]


def warning_of(kind: WarningKind, subject: str, sentence: str) -> NodeWarning:
    """Return the warning of a sentence of this package, whose remedy follows its first semicolon."""
    message, _, remedy = sentence.partition("; ")
    return NodeWarning(kind, subject, message, remedy)


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
        self._active: dict[tuple[WarningKind, str], NodeWarning] = {}
        self._renewed_at = float("-inf")

    def renew(self, max_age_s: float = 0.0, *, is_logged: bool = True) -> None:
        """Take over what every check finds now, unless that is newer than `max_age_s`."""
        now = self._clock()
        if now - self._renewed_at < max_age_s:
            return
        self._renewed_at = now
        found = {
            (warning.kind, warning.subject): warning
            for check in self._checks
            for warning in map(_printable, _run(check))
        }
        before = self._active
        self._active = {
            key: msgspec.structs.replace(found[key], since=old.since)
            for key, old in before.items()
            if key in found
        }
        for key, warning in found.items():
            if key not in self._active and self.counts()[warning.kind] < MAX_WARNINGS_PER_KIND:
                self._active[key] = msgspec.structs.replace(warning, since=self._wall_clock())
        if is_logged:
            self._log_changes(before)

    def current(self) -> list[NodeWarning]:
        """Return the warnings of now, oldest first."""
        self.renew(MAX_AGE_S)
        return list(self._active.values())

    def counts(self) -> Counter[WarningKind]:
        """Return how many warnings of each kind there were at the last renewal."""
        return Counter(kind for kind, _ in self._active)

    def _log_changes(self, before: dict[tuple[WarningKind, str], NodeWarning]) -> None:
        for key, warning in self._active.items():
            if key not in before:
                kind, subject = warning.kind.value, warning.subject
                page = warning.kind.page
                log.warning(
                    "warning began", limit_by=kind, kind=kind, subject=subject, text=warning.text, page=page
                )
        for key, warning in before.items():
            if key not in self._active:
                kind, lasted_s = warning.kind.value, round(self._wall_clock() - warning.since, 1)
                log.info(
                    "warning ended", limit_by=kind, kind=kind, subject=warning.subject, lasted_s=lasted_s
                )


def _run(check: Check) -> list[NodeWarning]:
    try:
        return list(check())
    except Exception:  # a bug of one check: the others go on, and readiness is still reported
        log.exception("warning check failed")
        return []


def _printable(warning: NodeWarning) -> NodeWarning:
    """Return the warning without control characters and of bounded length: names in it are of others."""
    return NodeWarning(
        warning.kind,
        _clean(warning.subject, MAX_SUBJECT_CHARS),
        _clean(warning.message, MAX_TEXT_CHARS),
        _clean(warning.remedy, MAX_TEXT_CHARS),
    )


def _clean(text: str, max_chars: int) -> str:
    if len(text) > max_chars:
        text = text[: max_chars - 3] + "..."
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
