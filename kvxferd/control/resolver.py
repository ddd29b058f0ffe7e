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
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import suppress

import structlog

from kvxferd.core.effects import NO_USER
from kvxferd.core.limits.fair_share import FairShare

log = structlog.get_logger()

# An answer takes milliseconds; the C library sends a lost query again after 5 s.
GIVE_UP_S = 6.0
# Running queries, including those that no caller waits for any more. A query without an answer takes 10 to
# 30 s, a thread 50 KiB. A user whose names have no answers delays its own names alone.
MAX_QUERIES = 64
MAX_QUERIES_OF_USER = 16
# Names whose query runs or waits: twice as many as there can be peers (`limits.max_peers`).
MAX_NAMES = 1024
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


class Resolver:
    """Runs at most one lookup of a name of each user at a time. Call every method on the loop's thread."""

    def __init__(self, lookup: Lookup = system_lookup, give_up_s: float = GIVE_UP_S) -> None:
        self._lookup = lookup
        self._give_up_s = give_up_s
        self._queries: dict[tuple[int, str], asyncio.Task[tuple[str, str]]] = {}  # by user and name
        self._running: set[tuple[int, str]] = set()  # those that have a thread
        self._names = FairShare(MAX_NAMES)  # how many queries each user has
        self._slots = asyncio.Semaphore(MAX_QUERIES)
        self._slots_of = defaultdict[int, asyncio.Semaphore](lambda: asyncio.Semaphore(MAX_QUERIES_OF_USER))
        self._last_addresses: OrderedDict[str, str] = OrderedDict()
        self._callers: set[asyncio.Task[None]] = set()

    def resolve(self, host: str, on_address: OnAddress, uid: int = NO_USER) -> None:
        """Call `on_address` with a numeric address of the host, or with "" and the reason; never at once."""
        caller = asyncio.get_running_loop().create_task(self._resolve(host, on_address, uid))
        self._callers.add(caller)
        caller.add_done_callback(self._callers.discard)

    def close(self) -> None:
        """Make no more callbacks. Threads end by themselves."""
        for task in (*self._callers, *self._queries.values()):
            task.cancel()

    async def _resolve(self, host: str, on_address: OnAddress, uid: int) -> None:
        address, reason = await self._wait(host, uid)
        address = address or self._last_addresses.get(host, "")
        try:
            on_address(address, "" if address else reason)
        except Exception:  # reported here: nothing waits for this task
            log.exception("resolver callback failed", limit_by=host, host=host)

    async def _wait(self, host: str, uid: int) -> tuple[str, str]:
        """Return an address, or "" and the reason, within `give_up_s`. A running query outlives the wait."""
        query = self._queries.get((uid, host))
        if query is None:
            if not self._names.acquire(uid):
                return "", (
                    f"{self._names.held} names wait for their name servers, "
                    f"{self._names.held_by(uid)} of them for uid {uid}; give a numeric address"
                )
            query = self._queries[uid, host] = asyncio.create_task(self._query(host, uid))
        await asyncio.wait([query], timeout=self._give_up_s)
        if query.done() and not query.cancelled():
            return query.result()
        if (uid, host) in self._running:
            return "", f"no name server answered for host name {host!r} within {self._give_up_s:g} s"
        query.cancel()
        return "", (
            f"cannot look up host name {host!r}: {len(self._running)} others wait for their name "
            f"servers, and none has answered within {self._give_up_s:g} s; give a numeric address"
        )

    async def _query(self, host: str, uid: int) -> tuple[str, str]:
        """Look the name up once there is room for the user's thread."""
        key = uid, host
        try:
            async with self._slots_of[uid], self._slots:
                self._running.add(key)
                address, reason = await self._look_up_in_thread(host)
        finally:
            self._running.discard(key)
            del self._queries[key]
            self._names.release(uid)
        if address:
            self._last_addresses.pop(host, None)
            self._last_addresses[host] = address
            if len(self._last_addresses) > MAX_CACHED:
                self._last_addresses.popitem(last=False)
        return address, reason

    async def _look_up_in_thread(self, host: str) -> tuple[str, str]:
        """Return an address, or "" and the reason. The thread keeps no exit waiting, unlike an executor's."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[tuple[str, str]] = loop.create_future()

        def set_found(outcome: tuple[str, str]) -> None:
            if not found.done():  # else the resolver was closed
                found.set_result(outcome)

        def look_up() -> None:
            outcome = self._look_up(host)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(set_found, outcome)

        try:
            threading.Thread(target=look_up, name="resolve", daemon=True).start()
        except RuntimeError as error:  # the system has no thread: a limit of processes or of memory
            why = f"{error}; raise the limit of tasks, or give a numeric address"
            return "", f"cannot resolve host name {host!r}: {why}"
        return await found

    def _look_up(self, host: str) -> tuple[str, str]:
        try:
            address = next(iter(self._lookup(host)), "")
        except Exception as error:  # any error: a query without a result would stay for ever
            why = error.strerror if isinstance(error, OSError) else str(error)
            return "", f"cannot resolve host name {host!r}: {why}; check the name and its server"
        return address, "" if address else f"host name {host!r} has no address"
