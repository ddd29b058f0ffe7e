"""Timed reads between two processes of this user, once for each choice of transports."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import msgspec

from kvxferd.cli.doctor.apart import Apart, run_apart
from kvxferd.cli.doctor.finding import Node
from kvxferd.core.lanes import ITSELF, NODE, for_data, parse_lanes, parse_line

SIZE_BYTES = 16 << 20
LIMIT_S = 30.0  # a cold import on a machine that is busy
END_S = 5.0
_MODULE = "kvxferd.cli.doctor.reading"


class Reading(NamedTuple):
    """What came of a read between two processes."""

    value: dict[str, Any]  # of `reading`; {}: nothing came of it
    refusal: str
    ucx: str  # UCX's version; "": not known
    itself: str  # transports for data to itself
    node: str  # and to the other process


def read_between(node: Node, transports: str = "") -> Reading:
    """Read. `transports`: UCX's names for those to use; "": as movers choose."""
    environment = dict(node.environment)
    if transports:
        environment["UCX_TLS"] = transports
    return _read(tuple(sorted(environment.items())), node.config.mover.library)


@functools.cache
def _read(variables: tuple[tuple[str, str], ...], library: str) -> Reading:
    environment = {"UCX_LOG_LEVEL": "info", **dict(variables)}
    source = Apart(_MODULE, ["source", str(SIZE_BYTES), library], environment)
    outcome = source.first_line(LIMIT_S)
    if outcome.value is not None:
        line = msgspec.json.encode(outcome.value) + b"\n"
        outcome = run_apart(_MODULE, ["reader", str(SIZE_BYTES), library], environment, LIMIT_S, line)
    ended = source.end(END_S)
    errors = outcome.errors + ended.errors
    lanes, version = _said(errors)
    return Reading(outcome.value or {}, _plain(outcome.refusal), version, lanes[ITSELF], lanes[NODE])


def _said(errors: str) -> tuple[dict[str, str], str]:
    """Return by reach what UCX chose, and its version."""
    lanes, version = {ITSELF: "", NODE: ""}, ""
    for said in filter(None, map(parse_line, errors.splitlines())):
        if said.text.startswith("Version "):
            version = said.text.split()[1]
        if (connected := parse_lanes(said.text)) is not None:
            lanes[connected.reach] = lanes.get(connected.reach) or for_data(connected.transports)
    return lanes, version


def _plain(refusal: str) -> str:
    """Leave out which class an error was of: ``kvxferd.errors.MoverError: cannot ...``."""
    head, separator, rest = refusal.partition(": ")
    return rest if separator and "." in head and " " not in head else refusal
