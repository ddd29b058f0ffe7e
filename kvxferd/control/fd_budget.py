"""The daemon's budget of file descriptors: its own, HTTP's, and those of workers' memory."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

from kvxferd.config import LimitsConfig

# The event loop, listeners, locks, ZMQ's own, the forkserver, the log (44 with one rank and two warm
# movers), files that Python opens for a short time, and RESERVED_FDS.
BASE_FDS = 64
FDS_PER_SESSION = 5  # socket, pidfd, fence page, delivery socket, a resident mover's socket
FDS_PER_RANK = 4  # a mover's socket and pidfd, and both again while its successor starts
FDS_PER_PEER = (
    10  # six for the connection to it, and up to four connections from it: 2,048 may reach the peer port
)
# HTTP has an eighth of the limit, and at most this: a scraper, probes, browsers and the CLI need ten.
MAX_HTTP_CONNECTIONS = 128
MIN_HTTP_CONNECTIONS = 12
# Kept between the soft limit and the hard one for operators' requests and the shutdown. In order, that takes
# five: the ownership file, its directory, a copy of a descriptor, and a socket pair for the loop that closes.
RESERVED_FDS = 16


def fds_needed(limits: LimitsConfig) -> int:
    """Return how many descriptors a full node has open, without those of GPU ranks' memory."""
    workers = limits.max_sessions * FDS_PER_SESSION + limits.max_ranks * FDS_PER_RANK
    return BASE_FDS + workers + limits.max_peers * FDS_PER_PEER + MAX_HTTP_CONNECTIONS


def max_memory_fds_of(limits: LimitsConfig, limit: int | None = None) -> int:
    """Return how many descriptors the memory of all workers may have: the rest of the limit on a full node.

    A node with a low limit has a quarter of it. Each is counted once and takes two: one for the session, and
    a copy while it is sent to the mover.
    """
    if limit is None:
        _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = 1 << 20
    return max(limit // 4, limit - fds_needed(limits)) // 2


def raise_fd_limit() -> int:
    """Raise the soft limit to the hard one less RESERVED_FDS; return the hard one (BASE_FDS counts those).

    A rank may bring hundreds of descriptors; the usual soft limit of 1,024 is for programs that use select.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = (
        hard_limit
        if hard_limit == resource.RLIM_INFINITY
        else hard_limit - min(RESERVED_FDS, hard_limit // 8)
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard_limit))
    return hard_limit


def release_reserved_fds() -> None:
    """Raise the soft limit to the hard one, for the shutdown."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


@contextmanager
def reserved_fds() -> Iterator[None]:
    """Raise the soft limit to the hard one within the context."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    release_reserved_fds()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def max_http_connections(limit: int) -> int:
    """Return how many connections HTTP may hold under that limit; workers and movers have the rest."""
    if limit == resource.RLIM_INFINITY:
        return MAX_HTTP_CONNECTIONS
    return max(MIN_HTTP_CONNECTIONS, min(MAX_HTTP_CONNECTIONS, limit // 8))


def fd_warnings(limits: LimitsConfig, limit: int) -> list[str]:
    """Return warnings if a full node would run out of descriptors."""
    needed = fds_needed(limits)
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return []
    return [
        f"RLIMIT_NOFILE is {limit}, and a full node of these limits has {needed} descriptors open, more with "
        "GPU ranks: raise the hard limit (LimitNOFILE= of the unit), or lower limits.max_sessions and "
        "limits.max_peers"
    ]
