"""Resolves host names to numeric addresses, on threads of its own.

libzmq resolves names in its only I/O thread: one DNS query without an answer stopped every peer for 10 s.
So it gets numeric addresses only. A query cannot be cancelled: its thread ends when the C library gives up
(`timeout` and `attempts` of resolv.conf), even if no caller waits any more.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import structlog

from kvxferd.core.effects import NO_USER
from kvxferd.core.limits.ledger import FairShare
from kvxferd.threads import on_thread

log = structlog.get_logger()

# An answer takes milliseconds; the C library sends a lost query again after 5 s.
GIVE_UP_S = 6.0
# Running queries, including those that no caller waits for any more: as many as there can be peers. A query
# without an answer takes 10 to 30 s, a thread 50 KiB. One user has seven eighths of them.
MAX_QUERIES = 512
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
    """Looks each name up once at a time. Call every method on the loop's thread."""

    def __init__(self, lookup: Lookup = system_lookup, give_up_s: float = GIVE_UP_S) -> None:
        self._lookup = lookup
        self._give_up_s = give_up_s
        self._queries: dict[str, asyncio.Future[tuple[str, str]]] = {}  # by name
        self._threads = FairShare(MAX_QUERIES)
        self._last_addresses: OrderedDict[str, str] = OrderedDict()
        self._callers: set[asyncio.Task[None]] = set()

    def resolve(self, host: str, on_address: OnAddress, uid: int = NO_USER) -> None:
        """Call `on_address` with a numeric address of the host, or with "" and the reason; never at once."""
        caller = asyncio.get_running_loop().create_task(self._resolve(host, on_address, uid))
        self._callers.add(caller)
        caller.add_done_callback(self._callers.discard)

    def close(self) -> None:
        """Make no more callbacks. Threads end by themselves."""
        for caller in self._callers:
            caller.cancel()

    async def _resolve(self, host: str, on_address: OnAddress, uid: int) -> None:
        address, reason = await self._wait(host, uid)
        address = address or self._last_addresses.get(host, "")
        try:
            on_address(address, "" if address else reason)
        except Exception:  # reported here: nothing waits for this task
            log.exception("resolver callback failed", limit_by=host, host=host)

    async def _wait(self, host: str, uid: int) -> tuple[str, str]:
        """Return an address, or "" and the reason, within `give_up_s`. A running query outlives the wait."""
        query = self._queries.get(host)
        if query is None:
            if not self._threads.acquire(uid):
                return "", (
                    f"cannot look up host name {host!r}: {self._threads.held} names wait for their name "
                    f"servers, {self._threads.held_by(uid)} of them for uid {uid}; give a numeric address"
                )
            query = self._start_query(host, uid)
        await asyncio.wait([query], timeout=self._give_up_s)
        if query.done():
            return query.result()
        return "", f"no name server answered for host name {host!r} within {self._give_up_s:g} s"

    def _start_query(self, host: str, uid: int) -> asyncio.Future[tuple[str, str]]:
        """Look the name up on a thread, which keeps no exit waiting."""
        try:
            query = on_thread(partial(self._look_up, host), "resolve")
        except RuntimeError as error:  # the system has no thread: a limit of processes or of memory
            self._threads.release(uid)
            query = asyncio.get_running_loop().create_future()
            why = f"{error}; raise the limit of tasks, or give a numeric address"
            query.set_result(("", f"cannot resolve host name {host!r}: {why}"))
            return query
        self._queries[host] = query
        query.add_done_callback(lambda _: self._finish(host, uid, query.result()[0]))
        return query

    def _finish(self, host: str, uid: int, address: str) -> None:
        del self._queries[host]
        self._threads.release(uid)
        if address:
            self._last_addresses.pop(host, None)
            self._last_addresses[host] = address
            if len(self._last_addresses) > MAX_CACHED:
                self._last_addresses.popitem(last=False)

    def _look_up(self, host: str) -> tuple[str, str]:
        try:
            address = next(iter(self._lookup(host)), "")
        except Exception as error:  # any error: a query without a result would stay for ever
            why = error.strerror if isinstance(error, OSError) else str(error)
            return "", f"cannot resolve host name {host!r}: {why}; check the name and its server"
        return address, "" if address else f"host name {host!r} has no address"
