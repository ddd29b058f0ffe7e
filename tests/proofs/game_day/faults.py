"""The faults: how each is struck, who sees it, and what a reader must find to know the cause."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvxferd.control.curve_keys import make_key
from kvxferd.mover.ucx_settings import tls_with_cuda
from kvxferd.tooling.child_process import ChildError
from tests.proofs.game_day.stage import Stage

Strike = Callable[[Stage], object]


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong. `sign`: of `SIGNS`, what the verdict of `node` must have; "": nothing."""

    name: str
    node: str  # whose outputs are read
    sign: str
    names: Callable[[Stage], tuple[str, ...]]  # texts, each of which names the cause
    strike: Strike | None  # None: the fault is there from the start
    make: Callable[[Path], Stage] = Stage


def _stop_source_movers(stage: Stage) -> None:
    for pid in stage.prefill.movers():
        os.kill(pid, signal.SIGSTOP)


def _fill_transfers(stage: Stage) -> None:
    """Publish what nobody reads, so that an engine's transfers are used up."""
    with stage.traffic.lock:
        for number in range(24):
            with suppress(ChildError):
                stage.source.publish(f"unread-{number}", [number % 64], 16, lease_s=120.0)


def _release_early(stage: Stage) -> None:
    stage.traffic.after_publish = lambda request, ref: stage.source.unpublish(ref) if request % 2 else None


def _crash_movers(stage: Stage) -> None:
    def crash() -> None:
        for _ in range(8):
            for pid in stage.decode.movers():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if over.wait(2.0):
                return

    over = threading.Event()
    threading.Thread(target=crash, daemon=True).start()


def _with_wrong_key(directory: Path) -> Stage:
    directory.mkdir(parents=True, exist_ok=True)
    public = {name: make_key(directory / f"{name}.key").public for name in ("prefill", "decode", "other")}

    def flags(own: str, allowed: str) -> tuple[str, ...]:
        path = str(directory / f"{own}.key")
        return ("--peer-curve-secret-key-file", path, "--peer-curve-allowed-keys", public[allowed])

    return Stage(directory, flags("prefill", "other"), flags("decode", "prefill"))


def _prefill_endpoint(stage: Stage) -> tuple[str, ...]:
    return (stage.endpoints["prefill"].partition("/?")[0].rpartition(":")[2],)


def _always(*texts: str) -> Callable[[Stage], tuple[str, ...]]:
    return lambda stage: texts


FEW = ("--limits-max-transfers-per-engine", "16")
TCP = {"UCX_TLS": tls_with_cuda("tcp")}
FAULTS = [
    Fault(
        "dead-peer", "decode", "Pulls fail",
        _prefill_endpoint, lambda stage: stage.prefill.kill(),
    ),
    Fault(
        "stalled-link", "decode", "Pulls fail",
        _prefill_endpoint, _stop_source_movers,
    ),
    Fault(
        "exhausted-limit", "prefill", "max_transfers_per_engine",
        _always("max_transfers_per_engine"), _fill_transfers, lambda directory: Stage(directory, FEW),
    ),
    Fault(
        "wrong-key", "decode", "Pulls fail",
        _always("admit", "allow-lists"), None, _with_wrong_key,
    ),
    Fault(
        "early-release", "decode", "Pulls fail",
        _always("unpublished", "released"), _release_early,
    ),
    Fault(
        "crash-loop", "decode", "",
        _always("mover died", "mover-lost"), _crash_movers,
    ),
    Fault(
        "tcp", "decode", "same-node-tcp",
        _always("TCP"), None, lambda directory: Stage(directory, **TCP),
    ),
]  # fmt: skip
