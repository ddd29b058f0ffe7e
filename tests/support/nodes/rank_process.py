"""A rank in a process of its own, as a test calls it."""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.tooling.child_process import ChildError, ChildProcess, Pending
from tests.support.nodes.agent import Agent
from tests.support.nodes.stores import DeviceStore, HostStore, OwnStore
from tests.support.tensor_allocators import TensorStore


class RankProcess:
    """Every method of `Agent` can be called. What one raises is a ChildError with its code."""

    def __init__(self, log: Path, environ: Mapping[str, str] | None = None) -> None:
        self._child = ChildProcess(functools.partial(Agent, dict(environ or {})), log)
        self._registering: Pending[float] | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self._child.call, getattr(Agent, name))

    def run(self, function: Callable[[Agent], Any]) -> Any:
        """Call a function with the agent in the process."""
        return self._child.call(function)

    @property
    def pid(self) -> int:
        return self._child.pid

    def start_registering(
        self, socket: str, spec: EngineSpec, store: Mapping[str, Any] | None = None, **facts: Any
    ) -> Pending[float]:
        """Register with a cache in host memory, or in one of a `TensorStore` or `DeviceStore`."""
        if store is None:
            return self._start(socket, spec, HostStore, facts)
        kind = TensorStore if "tensor" in store else DeviceStore
        return self._start(socket, spec, functools.partial(kind, **store), facts)

    def start_registering_resident(self, socket: str, spec: EngineSpec, **facts: Any) -> Pending[float]:
        """Register with memory of that process alone, and its mover there."""
        return self._start(socket, spec, OwnStore, facts)

    def _start(
        self, socket: str, spec: EngineSpec, make_store: Callable[[int], Any], facts: Mapping[str, Any]
    ) -> Pending[float]:
        layout = attention_layout(spec=spec, **facts)
        self._registering = self._child.start(Agent.register, socket, spec, layout, make_store)
        return self._registering

    def end_of(self, ticket: int) -> tuple[str, dict[str, Any]]:
        """The ticket's terminal event; others before it are dropped."""
        while (event := self.next_event()) is not None:
            name, fields = event
            if name in ("Delivered", "Failed") and fields["ticket"] == ticket:
                return name, fields
        raise AssertionError(f"ticket {ticket} never ended")

    def end_of_all(
        self, tickets: Sequence[int], limit_s: float = 30.0
    ) -> dict[int, tuple[str, dict[str, Any]]]:
        """The terminal event of each ticket, in whatever order they come; others are dropped."""
        ends: dict[int, tuple[str, dict[str, Any]]] = {}
        end = time.monotonic() + limit_s
        while len(ends) < len(tickets) and (event := self.next_event(end - time.monotonic())) is not None:
            if event[0] in ("Delivered", "Failed") and event[1]["ticket"] in tickets:
                ends[event[1]["ticket"]] = event
        assert len(ends) == len(tickets), f"of tickets {tickets} ended {ends}"
        return ends

    def await_event(self, wanted: str) -> dict[str, Any]:
        while (event := self.next_event()) is not None:
            if event[0] == wanted:
                return event[1]
        raise AssertionError(f"no {wanted} came")

    def send_signal(self, number: signal.Signals) -> None:
        self._child.send_signal(number)

    def kill(self) -> None:
        self._child.kill()

    def leave(self) -> bool:
        """Return whether the process lives, has nothing registered any more, and can serve another test."""
        if self._child.exit_code is not None:
            return False
        self.send_signal(signal.SIGCONT)
        try:
            if self._registering is not None:
                self._registering.result(0.0)
            return self._child.call(Agent.leave)
        except ChildError:  # it dies just now, is still registering, or was refused
            return False
        finally:
            self._registering = None

    def stop(self) -> None:
        self._child.stop()


def ranks_of(spec: EngineSpec) -> list[EngineSpec]:
    return [msgspec.structs.replace(spec, pp_rank=r.pp_rank, tp_rank=r.tp_rank) for r in spec.ranks()]
