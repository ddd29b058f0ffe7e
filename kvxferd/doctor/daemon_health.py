"""Whether a daemon is running, and its health."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

import kvxferd
from kvxferd.doctor.finding import CheckContext, Finding, fail, ok, warn
from kvxferd.errors import KvxferdError
from kvxferd.telemetry.minute_text import describe_failures, describe_rates
from kvxferd.telemetry.sample_report import LastMinute


def check(node: CheckContext) -> Iterator[Finding]:
    """Read its status from the control socket."""
    try:
        answer = node.daemon.get("/v1/status")
    except KvxferdError as error:
        found, _, todo = error.message.removeprefix("cannot ask the daemon at ").partition("; ")
        yield fail("daemon", found, todo or "see its log")
        return
    facts = {"version": answer["version"], "endpoint": answer["node"]["endpoint"]}
    if not answer["ready"]:
        yield fail("daemon", "not ready: " + "; ".join(answer["reasons"]), "see its log", **facts)
    elif answer["version"] != kvxferd.__version__:
        found = f"version {answer['version']}, and this command is of {kvxferd.__version__}"
        yield warn("daemon", found, "use the command of the daemon's own environment", **facts)
    else:
        yield ok("daemon", f"ready at {facts['endpoint']}", **facts)
    yield _last_minute(msgspec.convert(answer["last_minute"], LastMinute), answer["verdict"]["remedy"])
    for found, todo in _warnings(answer):
        yield warn("daemon's warning", found, todo or "see docs/how-to/when-something-is-wrong.md")


def _last_minute(minute: LastMinute, todo: str) -> Finding:
    """Return whether pulls failed in the last minute. `todo`: the daemon's own advice then."""
    if failures := describe_failures(minute):
        return warn(
            "last minute", f"pulls fail: {failures}", todo, failed=minute.failed, delivered=minute.delivered
        )
    return ok("last minute", describe_rates(minute))


def _warnings(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """Return each warning's message and remedy."""
    return [(warning["message"], warning["remedy"]) for warning in answer["active_warnings"]]
