"""Whether a daemon is running, and its health."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

import kvxferd
from kvxferd.doctor.finding import CheckContext, Finding, fail, ok, warn
from kvxferd.errors import KvxferdError
from kvxferd.telemetry.overview import Level, NodeVerdict


def check(node: CheckContext) -> Iterator[Finding]:
    """Read its status from the control socket."""
    try:
        reply = node.daemon.get("/v1/status")
    except KvxferdError as error:
        found, _, todo = error.message.removeprefix("cannot ask the daemon at ").partition("; ")
        yield fail("daemon", found, todo or "see its log")
        return
    facts = {"version": reply["version"], "endpoint": reply["node"]["endpoint"]}
    if not reply["ready"]:
        yield fail("daemon", "not ready: " + "; ".join(reply["reasons"]), "see its log", **facts)
    elif reply["version"] != kvxferd.__version__:
        found = f"version {reply['version']}, and this command is of {kvxferd.__version__}"
        yield warn("daemon", found, "use the command of the daemon's own environment", **facts)
    else:
        yield ok("daemon", f"ready at {facts['endpoint']}", **facts)
    yield _state(msgspec.convert(reply["verdict"], NodeVerdict))
    for found, todo in _warnings(reply):
        yield warn("daemon's warning", found, todo or "see docs/how-to/when-something-is-wrong.md")


def _state(verdict: NodeVerdict) -> Finding:
    """Return the daemon's own verdict: pulls that fail, limits that are near, how many warnings it has."""
    if verdict.level is Level.GOOD:
        return ok("state", verdict.text)
    return warn("state", verdict.text, verdict.remedy or "`kvxferd status` has the rest")


def _warnings(reply: dict[str, Any]) -> list[tuple[str, str]]:
    """Return each warning's message and remedy."""
    return [(warning["message"], warning["remedy"]) for warning in reply["active_warnings"]]
