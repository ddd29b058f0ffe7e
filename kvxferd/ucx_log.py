"""Parses the transports that UCX uses from its log.

UCX has no function that returns the transports of a read. But each time that a process connects in a new way,
it logs one line at level INFO: whether to itself, to a process of the same machine or to another machine, and
over which transports. It logs to standard output, where each mover reads its own lines.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple, TypeAlias

# [1700000000.123456] [host:4711 :0] ucp_worker.c:1997 UCX  INFO  NAME intra-node cfg#1 am(tcp/lo cma/memory)
_LINE = re.compile(
    r"^\[[\d.]+\] \[[^\]]*?:\s*(?P<pid>\d+)\s*:\d+\s*\]\s+\S+\s+UCX\s+(?P<level>[A-Z]+)\s+(?P<text>.*)$"
)
_CONNECTED = re.compile(r"(?:^|\s)(?P<reach>self|intra-node|inter-node) cfg#\d+ (?P<lanes>.*)$")
CONNECTED_MARK = "cfg#"  # in every line about a connection, also where the rest cannot be parsed
_GROUP = re.compile(r"(?P<use>\w+)\((?P<transports>[^)]*)\)")
# Reads of data use the best transport of the groups; these groups only connect and watch.
_NOT_DATA = frozenset({"ka", "cm"})
Reach: TypeAlias = Literal["itself", "node", "network"]
ITSELF: Final = "itself"
NODE: Final = "node"
NETWORK: Final = "network"
REACHES: tuple[Reach, ...] = (ITSELF, NODE, NETWORK)
_REACH: dict[str, Reach] = {"self": ITSELF, "intra-node": NODE, "inter-node": NETWORK}

_SLOW = "tcp"
# With these the bytes of a read are copied at most once, from process to process.

_HOST_COPIES = frozenset({"cma", "xpmem", "knem"})
_SHARED_QUEUES = frozenset({"self", "sysv", "posix"})


class UcxLine(NamedTuple):
    """A line of UCX's log."""

    pid: int
    level: str  # "INFO", "WARN", "ERROR", ...
    text: str


class TransportsUsed(NamedTuple):
    """The transports of one kind of connection of a process."""

    reach: Reach  # node: another process of this machine
    transports: tuple[str, ...]  # "cma/memory", "rc_mlx5/mlx5_0:1", ...; in UCX's order
    is_fully_parsed: bool = True  # False: a part of the line could not be parsed


def parse_line(line: str) -> UcxLine | None:
    """Return the line of UCX's log; None where it is not UCX's."""
    match = _LINE.match(line)
    return UcxLine(int(match["pid"]), match["level"], match["text"].strip()) if match else None


def parse_transports(text: str) -> TransportsUsed | None:
    """Return over which transports a process has connected; None where the text is about something else."""
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
    """Whether the text is about a connection, in whatever form."""
    return CONNECTED_MARK in text


def data_transports(transports: tuple[str, ...]) -> str:
    """Return the transports that carry data, in short form: "cma", "rc_mlx5/mlx5_0:1", "tcp".

    TCP is always there, to connect and to watch connections; it carries data only where nothing else can.
    """
    fast = [t for t in transports if transport_kind(t) not in {_SLOW, *_SHARED_QUEUES}]
    names = [transport_kind(t) if t.endswith("/memory") else t for t in fast]
    return ", ".join(dict.fromkeys(names)) or (_SLOW if transports else "")


def slow_transports(all_used: tuple[TransportsUsed, ...]) -> tuple[TransportsUsed, ...]:
    """Return a mover's connections over TCP to its own machine where a faster transport exists."""
    itself = next((lanes.transports for lanes in all_used if lanes.reach == ITSELF), ())
    return tuple(
        lanes for lanes in all_used if lanes.reach == NODE and is_slow_on_node(itself, lanes.transports)
    )


def is_slow_on_node(itself: tuple[str, ...], node: tuple[str, ...]) -> bool:
    """Whether a mover reads from other processes of its machine over TCP although a faster transport exists.

    The transports to itself show what the machine and the settings allow. What differs is the other
    process: its user, or its PID namespace.
    """
    could = {transport_kind(t) for t in itself} & _HOST_COPIES
    return bool(node) and bool(could) and not any(transport_kind(t) != _SLOW for t in node)


def transport_kind(transport: str) -> str:
    """Return the transport's name without its device."""
    return transport.partition("/")[0]
