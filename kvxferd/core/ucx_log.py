"""Which transports UCX chose, read from what it says when it connects.

UCX tells nobody which of its transports a read goes over. But each time that a process connects in a new
way it writes one line at its level INFO: to itself, to a process of the same machine or to another
machine, and by what. The movers write those to standard error, the daemon reads them there.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# [1700000000.123456] [host:4711 :0] ucp_worker.c:1997 UCX  INFO  NAME intra-node cfg#1 am(tcp/lo cma/memory)
_LINE = re.compile(
    r"^\[[\d.]+\] \[[^\]]*?:\s*(?P<pid>\d+)\s*:\d+\s*\]\s+\S+\s+UCX\s+(?P<level>[A-Z]+)\s+(?P<text>.*)$"
)
_CONNECTED = re.compile(r"(?:^|\s)(?P<reach>self|intra-node|inter-node) cfg#\d+ (?P<lanes>.*)$")
CONNECTED_MARK = "cfg#"  # in every line about a connection, whatever else of it can be read
_GROUP = re.compile(r"(?P<use>\w+)\((?P<transports>[^)]*)\)")
# Of what these groups hold, reads of data go over the best; the others are for connecting and watching.
_NOT_DATA = frozenset({"ka", "cm"})
ITSELF, NODE, NETWORK = REACHES = ("itself", "node", "network")
_REACH = {"self": ITSELF, "intra-node": NODE, "inter-node": NETWORK}

_SLOW = "tcp"
# With these the bytes of a read are copied once, from process to process, or not by a processor at all.
_HOST_COPIES = frozenset({"cma", "xpmem", "knem"})
_SHARED_QUEUES = frozenset({"self", "sysv", "posix"})


class UcxLine(NamedTuple):
    """A line of UCX's log."""

    pid: int
    level: str  # "INFO", "WARN", "ERROR", ...
    text: str


class TransportsUsed(NamedTuple):
    """One way in which a process has connected."""

    reach: str  # "itself", "node" (another process of this machine) or "network"
    transports: tuple[str, ...]  # "cma/memory", "rc_mlx5/mlx5_0:1", ...; in UCX's order
    is_fully_parsed: bool = True  # False: something in the line was not understood


def parse_line(line: str) -> UcxLine | None:
    """Return what UCX said, None where it was somebody else."""
    match = _LINE.match(line)
    return UcxLine(int(match["pid"]), match["level"], match["text"].strip()) if match else None


def parse_transports(text: str) -> TransportsUsed | None:
    """Return how a process has connected, None where the text is about something else."""
    match = _CONNECTED.search(text)
    if match is None:
        return None
    transports = [
        transport
        for group in _GROUP.finditer(match["lanes"])
        if group["use"] not in _NOT_DATA
        for transport in group["transports"].split()
    ]
    is_whole = not _GROUP.sub("", match["lanes"]).strip()
    return TransportsUsed(_REACH[match["reach"]], tuple(dict.fromkeys(transports)), is_whole)


def is_about_connection(text: str) -> bool:
    """Whether the text is of a connection, in whatever form."""
    return CONNECTED_MARK in text


def data_transports(transports: tuple[str, ...]) -> str:
    """Return the transports that carry data, shortly: "cma", "rc_mlx5/mlx5_0:1", "tcp".

    TCP is always there, to connect and to be watched by; data goes over it only where nothing else is.
    """
    fast = [t for t in transports if transport_kind(t) not in {_SLOW, *_SHARED_QUEUES}]
    names = [transport_kind(t) if t.endswith("/memory") else t for t in fast]
    return ", ".join(dict.fromkeys(names)) or (_SLOW if transports else "")


def slow_transports(all_used: tuple[TransportsUsed, ...]) -> tuple[TransportsUsed, ...]:
    """Return those of a mover's connections that are TCP to a process of its own machine, and need not be."""
    itself = next((lanes.transports for lanes in all_used if lanes.reach == ITSELF), ())
    return tuple(
        lanes for lanes in all_used if lanes.reach == NODE and is_slow_on_node(itself, lanes.transports)
    )


def is_slow_on_node(itself: tuple[str, ...], node: tuple[str, ...]) -> bool:
    """Whether a mover reads from others of its machine over TCP although it could do better.

    What it uses to itself shows what the machine and the settings allow. The difference is the
    other process: its user, or its PID namespace.
    """
    could = {transport_kind(t) for t in itself} & _HOST_COPIES
    return bool(node) and bool(could) and not any(transport_kind(t) != _SLOW for t in node)


def transport_kind(transport: str) -> str:
    """Return the transport's name without its device."""
    return transport.partition("/")[0]
