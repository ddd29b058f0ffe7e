"""Real transports that fail on demand, for a rank process: `run` arms them there."""

from __future__ import annotations

import threading
from typing import Any

from kvxferd.errors import Code, MoverError
from kvxferd.ids import AgentName
from kvxferd.mover.transport.base import ReadHandle
from kvxferd.mover.transport.nixl import NixlTransport, import_library

_armed = threading.Event()
_let_go = threading.Event()


class Sticky(NixlTransport):
    """While armed, reads do not end, and neither does the agent until it is let go."""

    def poll(self, handle: ReadHandle) -> bool:
        return False if _armed.is_set() else super().poll(handle)

    def post(self, *args: Any) -> Any:
        handle = super().post(*args)
        handle.done = handle.done and not _armed.is_set()
        return handle

    def close(self) -> None:
        if _armed.is_set():
            _armed.clear()  # the next mover is a good one
            _let_go.wait()
        super().close()


class Brittle(NixlTransport):
    """Once armed, the next thing that it is asked raises what nobody expects."""

    def progress(self) -> None:
        if _armed.is_set():
            _armed.clear()
            raise RuntimeError("broken on purpose")
        super().progress()


def sticky(agent: AgentName) -> Sticky:
    return Sticky(import_library(), agent)


def brittle(agent: AgentName) -> Brittle:
    return Brittle(import_library(), agent)


def missing(agent: AgentName) -> NixlTransport:
    raise MoverError(f"cannot make agent {agent}: no library on this node", Code.NIXL_UNAVAILABLE)


def arm(_: object) -> None:
    _armed.set()


def let_go(_: object) -> None:
    _let_go.set()
