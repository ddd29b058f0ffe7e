"""The result of a check: a verdict, what was found, and one sentence on what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from kvxferd.config import Config
from kvxferd.tooling.control_client import ControlClient


class Verdict(StrEnum):
    """Whether the finding is good, could be better, or is a failure."""

    OK = "ok"
    WARN = "warn"  # it works, and something should be better
    FAIL = "no"  # this cannot be done here


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One row of the report."""

    check: str  # the subject of the check
    verdict: Verdict
    found: str
    todo: str = ""
    essential: bool = False  # for "no": nothing works without it
    facts: dict[str, Any] = {}  # for machines, beyond the sentence
    name: str = ""  # name of the check that found it, as `--check` takes it


class CheckContext(NamedTuple):
    """The node under examination."""

    config: Config
    daemon: ControlClient
    # Of movers: this process's variables, and those that the settings give movers.
    environment: Mapping[str, str]
    config_path: str = ""  # of the file that `config` is from, where the verb names one


Check = Callable[[CheckContext], Iterable[Finding]]


def ok(check: str, found: str, **facts: Any) -> Finding:
    """Return a finding that is as it should be."""
    return Finding(check=check, verdict=Verdict.OK, found=found, facts=facts)


def warn(check: str, found: str, todo: str, **facts: Any) -> Finding:
    """Return a finding that works and could be better."""
    return Finding(check=check, verdict=Verdict.WARN, found=found, todo=todo, facts=facts)


def fail(check: str, found: str, todo: str, *, essential: bool = False, **facts: Any) -> Finding:
    """Return a finding that does not work."""
    return Finding(
        check=check, verdict=Verdict.FAIL, found=found, todo=todo, essential=essential, facts=facts
    )
