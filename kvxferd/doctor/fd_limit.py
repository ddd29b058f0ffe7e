"""RLIMIT_NOFILE: a GPU rank sends a file descriptor for each physical allocation."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from kvxferd.control.fd_budget import fds_needed
from kvxferd.doctor.finding import CheckContext, Finding, ok, warn


def check(node: CheckContext) -> Iterator[Finding]:
    """Check the hard limit, to which the daemon raises its soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = fds_needed(node.config.limits)
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
