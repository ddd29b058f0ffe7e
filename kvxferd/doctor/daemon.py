"""Whether a daemon is running, and its health."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

import kvxferd
from kvxferd.doctor.report import CheckContext, Finding, fail, no_daemon, ok, warn
from kvxferd.errors import KvxferdError
from kvxferd.telemetry.overview import Level, NodeVerdict


def answering(node: CheckContext) -> Iterator[Finding]:
    """Read its status from the control socket."""
    try:
        reply = node.daemon.get("/v1/status")
    except KvxferdError as error:
        yield no_daemon("daemon", error)
        return
    facts = {"version": reply["version"], "endpoint": reply["node"]["endpoint"]}
    if not reply["ready"]:
        yield fail("daemon", "not ready: " + "; ".join(reply["reasons"]), "see its log", **facts)
    elif reply["version"] != kvxferd.__version__:
        found = f"version {reply['version']}, and this command is of {kvxferd.__version__}"
        yield warn("daemon", found, "use the command of the daemon's own environment", **facts)
    else:
        yield ok("daemon", f"ready at {facts['endpoint']}", **facts)
    # Its own verdict: pulls that fail, limits that are near, how many warnings it has.
    verdict = msgspec.convert(reply["verdict"], NodeVerdict)
    if verdict.level is Level.GOOD:
        yield ok("state", verdict.text)
    else:
        yield warn("state", verdict.text, verdict.remedy or "`kvxferd status` has the rest")
    for warning in reply["warnings"]:
        todo = warning["remedy"] or "see docs/how-to/when-something-is-wrong.md"
        yield warn("warning", warning["message"], todo)
