"""Runs the demo: starts everything, moves request after request, stops everything."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from typing import TypeVar

from kvxferd.core.snapshot import PullRecord
from kvxferd.demo import protocol
from kvxferd.demo.results import DemoResults
from kvxferd.demo.shape import DemoShape, Role
from kvxferd.errors import KvxferdError
from kvxferd.ids import Rank
from kvxferd.telemetry.history import record_from_json
from kvxferd.tooling.async_tasks import gather_or_cancel, make_work_directory, run_until_signal
from kvxferd.tooling.line_protocol import Line
from kvxferd.tooling.subprocesses import CommandProcess, DaemonProcess

R = TypeVar("R", bound=Line)

TOOL = "the demo"
ROLES: tuple[Role, ...] = ("prefill", "decode")
PUBLISHER_RANK = Rank(0, 0)
# A daemon keeps 1024 records; each pull makes one, and handshakes make a few.
PULLS_PER_HISTORY_FETCH = 256


class DemoCluster:
    """Every process of a demo, in a directory that is removed with them."""

    def __init__(self, shape: DemoShape) -> None:
        self.shape = shape
        self.daemons: dict[Role, DaemonProcess] = {}
        self.workers: dict[tuple[Role, Rank], CommandProcess] = {}
        self._directory = make_work_directory("kvxferd-demo-")

    async def start(self) -> None:
        """Start all; return when both daemons are ready. Raises KvxferdError."""
        await gather_or_cancel(*(self._start_daemon(role) for role in ROLES))
        await gather_or_cancel(
            *(self._start_worker(role, rank) for role in ROLES for rank in self.shape.ranks(role))
        )
        await gather_or_cancel(*(daemon.wait_ready() for daemon in self.daemons.values()))

    async def register(self) -> None:
        """Have every worker register with its daemon. Raises KvxferdError."""
        await gather_or_cancel(
            *(
                worker.request(
                    protocol.StartRank(
                        shape=self.shape, role=role, rank=rank, worker_socket=self.daemons[role].worker_socket
                    ),
                    protocol.RankStarted,
                )
                for (role, rank), worker in self.workers.items()
            )
        )

    async def request_all(
        self, role: Role, command: Callable[[Rank], protocol.Command], kind: type[R]
    ) -> dict[Rank, R]:
        """Send every rank of an engine a command; return their replies. Raises KvxferdError."""
        ranks = self.shape.ranks(role)
        replies = await gather_or_cancel(
            *(self.workers[role, rank].request(command(rank), kind) for rank in ranks)
        )
        return dict(zip(ranks, replies, strict=True))

    async def stop(self) -> None:
        """Stop all, workers first; afterwards no process and no directory is left."""
        await asyncio.gather(*(worker.stop() for worker in self.workers.values()))
        await asyncio.gather(*(daemon.stop() for daemon in self.daemons.values()))
        shutil.rmtree(self._directory, ignore_errors=True)

    def log_tails(self) -> str:
        """Return the last lines of both daemons' logs."""
        return "\n".join(f"--- {role} daemon\n{daemon.log_tail()}" for role, daemon in self.daemons.items())

    async def _start_daemon(self, role: Role) -> None:
        os.mkdir(self._directory / role)
        self.daemons[role] = await DaemonProcess.start(TOOL, role, self._directory / role)

    async def _start_worker(self, role: Role, rank: Rank) -> None:
        self.workers[role, rank] = await CommandProcess.start(
            TOOL, "kvxferd.demo.worker", f"{role}.{rank}", self._directory, protocol.PROTOCOL
        )


def run_demo(shape: DemoShape, on_request: Callable[[int], None], damage: str = "") -> DemoResults:
    """Run the demo and return its results; `on_request` is called with the number of requests done.

    However it ends, SIGINT and SIGTERM included, its processes and its directory are gone then.
    Raises KeyboardInterrupt for both.
    """
    return asyncio.run(run_until_signal(_run(shape, on_request, damage)))


async def _run(shape: DemoShape, on_request: Callable[[int], None], damage: str) -> DemoResults:
    results = DemoResults(shape)
    cluster = DemoCluster(shape)
    try:
        started = time.monotonic()
        await cluster.start()
        results.daemons_ready_s = time.monotonic() - started
        await cluster.register()
        results.registered_s = time.monotonic() - started - results.daemons_ready_s
        on_request(0)
        for request in range(shape.requests):
            await _transfer_request(cluster, results, request, damage if request == 0 else "")
            on_request(request + 1)
        await _collect_pull_records(cluster, results)
    except KvxferdError as error:
        results.error = f"{error.message}\n{cluster.log_tails()}"
    finally:
        await cluster.stop()
    return results


async def _transfer_request(cluster: DemoCluster, results: DemoResults, request: int, damage: str) -> None:
    """Move one request: write and publish it, pull and check it, release it."""
    prefilled = await cluster.request_all(
        "prefill",
        lambda rank: protocol.PrefillCommand(request=request, publish=rank == PUBLISHER_RANK),
        protocol.Prefilled,
    )
    ref = prefilled[PUBLISHER_RANK].ref
    assert ref is not None
    pulled = await cluster.request_all(
        "decode",
        lambda rank: protocol.PullCommand(
            request=request, ref=ref, damage=damage if rank == PUBLISHER_RANK else ""
        ),
        protocol.PullResult,
    )
    results.add_request(pulled)
    unread = not all(one.delivered for one in pulled.values())
    freed = await cluster.request_all(
        "prefill",
        lambda rank: protocol.AwaitRelease(request=request, unpublish=unread and rank == PUBLISHER_RANK),
        protocol.BlocksFreed,
    )
    results.releases.update(one.why for one in freed.values())
    if results.pulls - len(results.records) >= PULLS_PER_HISTORY_FETCH:
        await _collect_pull_records(cluster, results)


async def _collect_pull_records(cluster: DemoCluster, results: DemoResults) -> None:
    """Read the phases of the pulls from the decode daemon's history."""
    answer = await cluster.daemons["decode"].get("/v1/history")
    records = map(record_from_json, answer["records"])
    results.add_records([record for record in records if isinstance(record, PullRecord)])
