"""Whether a daemon is running, its health, and its workers' users and PID namespaces."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import msgspec

import kvxferd
from kvxferd.doctor.report import CheckContext, Finding, fail, no_daemon, ok, warn
from kvxferd.errors import KvxferdError
from kvxferd.records import NodeSnapshot
from kvxferd.telemetry.overview import Level, NodeVerdict
from kvxferd.tooling.output import format_count


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
    for warning in reply["active_warnings"]:
        todo = warning["remedy"] or "see docs/how-to/when-something-is-wrong.md"
        yield warn("warning", warning["message"], todo)


def workers(node: CheckContext) -> Iterator[Finding]:
    """Compare the registered workers' users and namespaces: only processes that share both can use CMA.

    Yields nothing if there is no daemon.
    """
    try:
        shown = msgspec.convert(node.daemon.get("/v1/status")["node"], NodeSnapshot)
    except KvxferdError:
        return
    ranks = [rank for engine in shown.engines for rank in engine.ranks if rank.worker_pid]
    if not ranks:
        return
    users = Counter(str(rank.worker_uid) for rank in ranks)
    places = Counter(_namespace(rank.worker_pid) for rank in ranks)
    found = "; ".join(
        (format_count(len(ranks), "rank"), _counts("uid", users), _counts("PID namespace", places))
    )
    facts = {"uids": dict(users), "pid_namespaces": dict(places)}
    resident = any(rank.placement is not None and rank.placement.kind == "resident" for rank in ranks)
    if resident and (len(users) > 1 or len(places) > 1):
        todo = "run workers with resident movers as one user in one PID namespace: else they use TCP"
        yield warn("workers", found, todo, **facts)
    else:
        yield ok("workers", f"{found}; child movers are of the daemon's user wherever workers are", **facts)


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except PermissionError:
        return "not for this user to see"
    except OSError:
        return "another PID namespace, or gone"


def _counts(what: str, counts: Counter[str]) -> str:
    return what + " " + ", ".join(f"{key} ({count})" for key, count in sorted(counts.items()))
