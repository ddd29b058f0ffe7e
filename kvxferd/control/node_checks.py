"""The checks of warnings that read this node: its limits, its movers' processors and crashes, its log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from kvxferd.config import LimitsConfig
from kvxferd.core.node import Node
from kvxferd.telemetry.log_queue import LOG_COUNTS
from kvxferd.telemetry.warnings.limit_checks import DroppedLines, LimitUse, NearLimits
from kvxferd.telemetry.warnings.mover_checks import CrashingMovers, StarvedMovers, clocks_of, stopped_movers
from kvxferd.telemetry.warnings.warning_list import Finding

# Two files of a mover take 30 us; 128 movers, read at this interval, take a thousandth of the loop.
SCHEDSTAT_EVERY_S = 5.0
_PROC = Path("/proc")
_CARDS = Path("/sys/class/infiniband")


class NodeChecks:
    """Reads what the pure checks judge. `movers` returns the engine of each child mover, by its pid."""

    def __init__(
        self, node: Node, movers: Callable[[], Mapping[int, str]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._node = node
        self._movers = movers
        self._clock = clock
        self._near_limits = NearLimits()
        self._dropped_lines = DroppedLines(LOG_COUNTS.dropped)
        self._starved_movers = StarvedMovers()
        self._crashing_movers = CrashingMovers()
        self._stopped_movers: list[Finding] = []
        self._read_movers_at = float("-inf")

    def record_crash(self, engine: str) -> None:
        """Count a mover that ended although nothing had ended it; "": one without a rank."""
        self._crashing_movers.record(engine, self._clock())

    def findings(self) -> list[Finding]:
        """Return what every check finds now."""
        now = self._clock()
        if now - self._read_movers_at >= SCHEDSTAT_EVERY_S:
            self._read_movers_at = now
            self._read_movers(now)
        return [
            *self._crashing_movers.findings(now),
            *self._near_limits.findings(limit_uses(self._node)),
            *self._starved_movers.findings(),
            *self._stopped_movers,
            *self._dropped_lines.findings(LOG_COUNTS.dropped, now),
        ]

    def _read_movers(self, now: float) -> None:
        movers = self._movers()
        # Of the process's first thread: a mover's loop.
        self._starved_movers.update(clocks_of(movers, _read_proc(movers, "schedstat")), now)
        self._stopped_movers = stopped_movers(movers, _read_proc(movers, "stat"))


def _read_proc(pids: Iterable[int], name: str) -> dict[int, bytes]:
    """Return that file of each process that has not exited. A kernel may not have it."""
    found = {}
    for pid in pids:
        with suppress(OSError):
            found[pid] = (_PROC / str(pid) / name).read_bytes()
    return found


def limit_uses(node: Node) -> Iterator[LimitUse]:
    """Yield how much of each limit is used."""
    limits: LimitsConfig = node.context.settings.limits
    yield LimitUse("limits.max_sessions", len(node.sessions), limits.max_sessions)
    yield LimitUse("limits.max_ranks", node.registry.num_ranks_by_user().total(), limits.max_ranks)
    yield LimitUse("limits.max_peers", node.peers.num_peers, limits.max_peers)
    engine, num_transfers = node.published.table.largest_engine()
    where = "" if engine is None else f"engine {engine.engine_id}"
    yield LimitUse("limits.max_transfers_per_engine", num_transfers, limits.max_transfers_per_engine, where)
    admission = node.pulls.admission
    yield LimitUse(
        "limits.max_pulls_per_rank", admission.most_of_a_rank, limits.max_pulls_per_rank, "one rank"
    )
    yield LimitUse("limits.max_inflight_bytes", admission.inflight_bytes, limits.max_inflight_bytes)


def active_rdma_cards(cards: Path = _CARDS) -> list[str]:
    """Return the names of the RDMA devices with an active port. Only read at start: sysfs may be slow."""
    found = []
    for card in sorted(cards.glob("*")):
        try:
            is_active = any("ACTIVE" in state.read_text() for state in card.glob("ports/*/state"))
        except OSError:
            continue
        if is_active:
            found.append(card.name)
    return found
