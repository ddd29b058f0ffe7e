"""Timed reads between two processes of this user, made once for each set of transports."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import msgspec

from kvxferd.core.ucx_log import ITSELF, NODE, data_transports, parse_line, parse_transports
from kvxferd.doctor.finding import CheckContext
from kvxferd.mover.backends import Backend, backend_environment
from kvxferd.mover.ucx_settings import tls_with_cuda
from kvxferd.tooling.isolated_process import IsolatedProcess, run_isolated

SIZE_BYTES = 16 << 20
READ_TIMEOUT_S = 30.0  # a cold import on a busy machine
EXIT_TIMEOUT_S = 5.0
_MODULE = "kvxferd.doctor.nixl_read_process"


class ReadResult(NamedTuple):
    """The result of a read between two processes."""

    value: dict[str, Any]  # printed by `nixl_read_process`; {}: the read failed
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
    arguments = [str(SIZE_BYTES), library]
    source = IsolatedProcess(_MODULE, ["source", *arguments], environment)
    outcome = source.read_first_line(READ_TIMEOUT_S)
    if outcome.value is not None:
        line = msgspec.json.encode(outcome.value) + b"\n"
        outcome = run_isolated(_MODULE, ["reader", *arguments], environment, READ_TIMEOUT_S, line)
    ended = source.finish(EXIT_TIMEOUT_S)
    errors = outcome.stderr + ended.stderr
    lanes, version = _parse_ucx_log(errors)
    return ReadResult(
        outcome.value or {}, _without_class_name(outcome.failure), version, lanes[ITSELF], lanes[NODE]
    )


def _parse_ucx_log(errors: str) -> tuple[dict[str, str], str]:
    """Return the transports that UCX chose, by reach, and its version."""
    lanes, version = {ITSELF: "", NODE: ""}, ""
    for line in filter(None, map(parse_line, errors.splitlines())):
        if line.text.startswith("Version "):
            version = line.text.split()[1]
        if (connected := parse_transports(line.text)) is not None:
            lanes[connected.reach] = lanes.get(connected.reach) or data_transports(connected.transports)
    return lanes, version


def _without_class_name(refusal: str) -> str:
    """Remove the class of an error: ``kvxferd.errors.MoverError: cannot ...``."""
    head, separator, rest = refusal.partition(": ")
    return rest if separator and "." in head and " " not in head else refusal
