"""Timed reads between two processes of this user, made once for each set of transports."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from kvxferd.doctor.finding import CheckContext
from kvxferd.doctor.isolated import call_isolated, isolated
from kvxferd.doctor.nixl_read_process import ReadAgent
from kvxferd.errors import KvxferdError
from kvxferd.mover.backends import Backend, backend_environment
from kvxferd.mover.ucx_settings import tls_with_cuda
from kvxferd.ucx_log import ITSELF, NODE, data_transports, parse_line, parse_transports

SIZE_BYTES = 16 << 20
READ_TIMEOUT_S = 30.0  # a cold import on a busy machine


class ReadResult(NamedTuple):
    """The result of a read between two processes."""

    value: dict[str, Any]  # of `ReadAgent.read`; {}: the read failed
    failure: str
    ucx_version: str  # UCX's version; "": unknown
    loopback_transports: str  # the data transports to the same process
    node_transports: str  # and those to the other process


def read_between(node: CheckContext, transports: str = "") -> ReadResult:
    """Return the result of a read. `transports`: UCX's names of those to use; "": as movers choose."""
    environment = dict(node.environment)
    if transports:
        environment["UCX_TLS"] = tls_with_cuda(transports)
    mover = node.config.mover
    environment |= backend_environment(Backend(mover.backend, mover.backend_parameters))
    return _read_cached(tuple(sorted(environment.items())), mover.library)


@functools.cache
def _read_cached(variables: tuple[tuple[str, str], ...], library: str) -> ReadResult:
    environment = {"UCX_LOG_LEVEL": "info", **dict(variables)}
    value: dict[str, Any] = {}
    failure = ""
    with isolated(ReadAgent, environment) as reader, isolated(ReadAgent, environment) as source:
        try:
            span = call_isolated(source, READ_TIMEOUT_S, ReadAgent.open_source, SIZE_BYTES, library)
            value = call_isolated(reader, READ_TIMEOUT_S, ReadAgent.read, SIZE_BYTES, library, span)
        except KvxferdError as error:
            failure = error.message
        log = "\n".join(process.log.read_text(errors="replace") for process in (reader, source))
    lanes, version = _parse_ucx_log(log)
    return ReadResult(value, failure, version, lanes[ITSELF], lanes[NODE])


def _parse_ucx_log(log: str) -> tuple[dict[str, str], str]:
    """Return the transports that UCX chose, by reach, and its version."""
    lanes, version = {ITSELF: "", NODE: ""}, ""
    for line in filter(None, map(parse_line, log.splitlines())):
        if line.text.startswith("Version "):
            version = line.text.split()[1]
        if (connected := parse_transports(line.text)) is not None:
            lanes[connected.reach] = lanes.get(connected.reach) or data_transports(connected.transports)
    return lanes, version
