"""Users and PID namespaces of registered workers: only processes that share both can use CMA."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import msgspec

from kvxferd.doctor.finding import CheckContext, Finding, ok, warn
from kvxferd.errors import KvxferdError
from kvxferd.records import NodeSnapshot
from kvxferd.tooling.output import format_count

NOT_VISIBLE = "another PID namespace, or gone"


def check(node: CheckContext) -> Iterator[Finding]:
    """Compare the registered workers' users and namespaces; yield nothing if there is no daemon."""
    try:
        shown = msgspec.convert(node.daemon.get("/v1/status")["node"], NodeSnapshot)
    except KvxferdError:
        return
    ranks = [rank for engine in shown.engines for rank in engine.ranks if rank.worker_pid]
    if not ranks:
        return
    users = Counter(rank.worker_uid for rank in ranks)
    places = Counter(_namespace(rank.worker_pid) for rank in ranks)
    registered = format_count(len(ranks), "rank")
    found = f"{registered}; {_format_counts('uid', users)}; {_format_counts('PID namespace', places)}"
    facts = {"uids": {str(k): v for k, v in users.items()}, "pid_namespaces": dict(places)}
    resident = [rank for rank in ranks if rank.placement is not None and rank.placement.kind == "resident"]
    if resident and (len(users) > 1 or len(places) > 1):
        yield warn(
            "workers",
            found,
            "run workers with resident movers as one user in one PID namespace, or they read each other "
            "over TCP",
            **facts,
        )
    else:
        yield ok("workers", f"{found}; child movers are of the daemon's user wherever workers are", **facts)


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except PermissionError:
        return "not for this user to see"
    except OSError:
        return NOT_VISIBLE


def _format_counts(what: str, counts: Counter[int] | Counter[str]) -> str:
    return what + " " + ", ".join(f"{key} ({count})" for key, count in sorted(counts.items()))
