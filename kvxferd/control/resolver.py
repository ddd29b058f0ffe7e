"""Resolves host names to numeric addresses, on threads of its own.

libzmq resolves names in its only I/O thread: one DNS query without an answer stopped every peer for 10 s.
So it gets numeric addresses only. A query cannot be cancelled: its thread ends when the C library gives up
(`timeout` and `attempts` of resolv.conf), even if no caller waits any more.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from kvxferd.core.effects import NO_USER
from kvxferd.core.limits.fair_share import FairShare
from kvxferd.fair_queue import FairQueue

log = structlog.get_logger()

# An answer takes milliseconds; the C library sends a lost query again after 5 s.
GIVE_UP_S = 6.0
# Running queries, including those that no caller waits for any more. A query without an answer takes 10 to
# 30 s, a thread 50 KiB: a client that names such a host each second has at most 30 of them.
MAX_QUERIES = 64
# Names that wait for a query of their user to end: twice as many as there can be peers (`limits.max_peers`).
MAX_QUEUED = 1024
# The last known address of a name, used if its server does not answer: 512 peers and their former names.
MAX_CACHED = 4096

# Takes a host, returns its numeric addresses in order of preference. Raises OSError, as `getaddrinfo` does.
Lookup = Callable[[str], list[str]]
OnAddress = Callable[[str, str], None]  # the address, or "" and the reason


def system_lookup(host: str) -> list[str]:
    """Use the system's resolver. IPv4 first: an advertised name with both was always reached by that."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in sorted(found, key=lambda e: e[0] != socket.AF_INET)]
    return list(dict.fromkeys(addresses))


def is_numeric(host: str) -> bool:
    """Whether the host is a numeric address (IPv6 without brackets)."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(slots=True)
class _Query:
    """A name whose lookup runs or is queued, with its callbacks."""

    uid: int = NO_USER  # the user whose share it counts in, once it runs
    is_running: bool = False
    queued_uids: set[int] = field(default_factory=set)  # users in whose queues it is
    callbacks: list[OnAddress] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


class Resolver:
    """Runs at most one lookup of a name at a time. Call every method on the loop's thread.

    Each user has a share of the running queries and a queue of its own; queues take turns.
    """

    def __init__(self, lookup: Lookup = system_lookup, give_up_s: float = GIVE_UP_S) -> None:
        self._lookup = lookup
        self._give_up_s = give_up_s
        self._queries: dict[str, _Query] = {}
        self._running = FairShare(MAX_QUERIES)
        self._num_queued = FairShare(MAX_QUEUED)
        self._queued: FairQueue[int, str] = FairQueue()
        self._last_addresses: OrderedDict[str, str] = OrderedDict()
        self._stopped = False

    def resolve(self, host: str, on_address: OnAddress, uid: int = NO_USER) -> None:
        """Call `on_address` with a numeric address of the host, or with "" and the reason; never at once."""
        loop = asyncio.get_running_loop()
        query = self._queries.get(host)
        if query is None or not (query.is_running or uid in query.queued_uids):
            # Even if it is in another user's queue: that one may be long.
            if not self._num_queued.acquire(uid):
                reason = (
                    f"{self._num_queued.held} names wait for their name servers, "
                    f"{self._num_queued.held_by(uid)} of them for uid {uid}; give a numeric address"
                )
                loop.call_soon(self._call_back, host, [on_address], "", reason)
                return
            query = self._queries.setdefault(host, _Query())
            query.queued_uids.add(uid)
            self._queued.put(uid, host)
        query.callbacks.append(on_address)
        if query.timer is None:
            query.timer = loop.call_later(self._give_up_s, self._give_up, host, query)
        self._start_queued(loop)

    def _start_queued(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start queued lookups while there is room, a name of each user in turn."""
        while not self._stopped:
            uid = self._queued.next_user(self._running.has_room)
            if uid is None:
                return
            host = self._dequeue(uid)
            query = self._queries.get(host)
            if query is None or query.is_running:
                continue  # started in another user's turn, or no caller waits any more
            query.is_running, query.uid = True, uid
            self._running.add(uid, 1)
            if reason := self._start(loop, host):
                loop.call_soon(self._on_looked_up, host, "", reason)

    def _dequeue(self, uid: int) -> str:
        """Remove the first of that user's names."""
        host = self._queued.get_of(uid)
        self._num_queued.release(uid)
        if query := self._queries.get(host):
            query.queued_uids.discard(uid)
        return host

    def _start(self, loop: asyncio.AbstractEventLoop, host: str) -> str:
        """Start a thread that calls `_on_looked_up` once; or return why there is none."""
        try:
            threading.Thread(target=self._look_up, args=(loop, host), name="resolve", daemon=True).start()
        except RuntimeError as error:  # the system has no thread: a limit of processes or of memory
            why = f"{error}; raise the limit of tasks, or give a numeric address"
            return f"cannot resolve host name {host!r}: {why}"
        return ""

    def close(self) -> None:
        """Make no more callbacks. Threads end by themselves."""
        self._stopped = True
        for query in self._queries.values():
            if query.timer is not None:
                query.timer.cancel()

    def _look_up(self, loop: asyncio.AbstractEventLoop, host: str) -> None:
        """Look the name up, on the query's thread."""
        address, reason = "", f"host name {host!r} has no address"
        try:
            address = next(iter(self._lookup(host)), "")
        except Exception as error:  # any error: a query without a result would stay for ever
            why = error.strerror if isinstance(error, OSError) else str(error)
            reason = f"cannot resolve host name {host!r}: {why}; check the name and its server"
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._on_looked_up, host, address, reason)

    def _on_looked_up(self, host: str, address: str, reason: str) -> None:
        query = self._queries.pop(host)
        self._running.release(query.uid)
        if query.timer is not None:
            query.timer.cancel()
        if address:
            self._last_addresses.pop(host, None)
            self._last_addresses[host] = address
            if len(self._last_addresses) > MAX_CACHED:
                self._last_addresses.popitem(last=False)
        self._call_back(host, query.callbacks, address, reason)
        self._start_queued(asyncio.get_running_loop())

    def _give_up(self, host: str, query: _Query) -> None:
        """End the callers' wait. A running query still counts, since its thread still exists."""
        query.timer = None
        if not query.is_running:
            del self._queries[host]  # `_start_queued` skips its name
        waiting, query.callbacks = query.callbacks, []
        reason = f"no name server answered for host name {host!r} within {self._give_up_s:g} s"
        if not query.is_running:
            reason = (
                f"cannot look up host name {host!r}: {self._running.held} others wait for their name "
                f"servers, and none has answered within {self._give_up_s:g} s; give a numeric address"
            )
        self._call_back(host, waiting, "", reason)

    def _call_back(self, host: str, callbacks: list[OnAddress], address: str, reason: str) -> None:
        if self._stopped:
            return
        address = address or self._last_addresses.get(host, "")
        for on_address in callbacks:
            try:
                on_address(address, "" if address else reason)
            except Exception:  # the other callbacks must still run
                log.exception("resolver callback failed", limit_by=host, host=host)
