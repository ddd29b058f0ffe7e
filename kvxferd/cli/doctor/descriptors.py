"""RLIMIT_NOFILE: a GPU rank brings a descriptor for each physical allocation."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from kvxferd.cli.doctor.finding import Finding, Node, ok, warn

# Sessions, each with a socket and a fence page; movers, each with a socket and a process descriptor; peers.
PER_SESSION, PER_RANK, PER_PEER = 3, 4, 4


def check(node: Node) -> Iterator[Finding]:
    """The hard limit: the daemon raises its soft one to it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = node.config.limits
    needed = limits.max_sessions * PER_SESSION + limits.max_ranks * PER_RANK + limits.max_peers * PER_PEER
    if hard != resource.RLIM_INFINITY and hard < needed:
        yield warn(
            "descriptors",
            f"at most {hard}; a full node of these limits has {needed} open, and GPU ranks bring more",
            f"raise the hard limit: LimitNOFILE={max(65536, needed)} in the unit",
            soft=soft,
            hard=hard,
        )
    else:
        yield ok("descriptors", f"at most {hard} (now {soft}; the daemon raises it)", soft=soft, hard=hard)
