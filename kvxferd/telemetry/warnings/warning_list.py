"""The list of current warnings: when each began, and one line of the log at its beginning and its end.

Pure: the caller gives the findings and the clocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from kvxferd.telemetry.warnings.kinds import WarningKind

# Of one kind, as reasons of a placement have no limit; the first that were found stay.
MAX_WARNINGS_PER_KIND = 16
MAX_SUBJECT_CHARS = 200
# A placement's warning names four ranks beside a reason of the library.
MAX_TEXT_CHARS = 2_000


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


class WarningCondition(NamedTuple):
    """What a check has found now. `subject` tells it from others of its kind."""

    kind: WarningKind
    subject: str
    message: str
    remedy: str = ""


class WarningChange(NamedTuple):
    """A warning that began or ended, to be logged."""

    what: Literal["began", "ended"]
    warning: NodeWarning
    lasted_s: float


def finding_of(kind: WarningKind, subject: str, sentence: str) -> WarningCondition:
    """Return the finding of a sentence of this package, whose remedy follows its first semicolon."""
    message, _, remedy = sentence.partition("; ")
    return WarningCondition(kind, subject, message, remedy)


class _Active:
    __slots__ = ("found_at", "started", "warning")

    def __init__(self, warning: NodeWarning, now: float) -> None:
        self.warning = warning
        self.started = now
        self.found_at = now


class WarningList:
    """The current warnings, in the order in which they began."""

    def __init__(self) -> None:
        self._active: dict[tuple[WarningKind, str], _Active] = {}
        self._counts: Counter[WarningKind] = Counter()

    def update(
        self, findings: Iterable[WarningCondition], now: float, unix_now: float
    ) -> list[WarningChange]:
        """Take over what is found now. Return the warnings that began or ended.

        A warning ends when it was not found for the `hold_s` of its kind.
        """
        changes = []
        for finding in findings:
            if (began := self._add(_printable(finding), now, unix_now)) is not None:
                changes.append(WarningChange("began", began, 0.0))
        for key, active in list(self._active.items()):
            missing_s = now - active.found_at
            if missing_s > 0 and missing_s >= key[0].hold_s:
                del self._active[key]
                self._counts[key[0]] -= 1
                changes.append(WarningChange("ended", active.warning, now - active.started))
        return changes

    def warnings(self) -> list[NodeWarning]:
        """Return the current warnings, oldest first."""
        return [active.warning for active in self._active.values()]

    def count(self, kind: WarningKind) -> int:
        """Return how many current warnings are of that kind."""
        return self._counts[kind]

    def _add(self, finding: WarningCondition, now: float, unix_now: float) -> NodeWarning | None:
        """Renew the warning of a finding. Return it if it is new, and there is room."""
        key = finding.kind, finding.subject
        active = self._active.get(key)
        if active is not None:
            active.found_at = now
            old = active.warning
            if (finding.message, finding.remedy) != (old.message, old.remedy):
                active.warning = msgspec.structs.replace(old, message=finding.message, remedy=finding.remedy)
            return None
        if self._counts[finding.kind] >= MAX_WARNINGS_PER_KIND:
            return None
        warning = NodeWarning(
            kind=finding.kind,
            subject=finding.subject,
            since=unix_now,
            message=finding.message,
            remedy=finding.remedy,
            page=finding.kind.page,
        )
        self._active[key] = _Active(warning, now)
        self._counts[finding.kind] += 1
        return warning


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
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    )
