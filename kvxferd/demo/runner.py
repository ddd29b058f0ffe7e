"""Runs the demo: starts everything, moves request after request, stops everything."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import msgspec

from kvxferd.demo.rank import DemoRank
from kvxferd.demo.report import DemoResults
from kvxferd.errors import KvxferdError
from kvxferd.ids import Rank
from kvxferd.tooling.child_process import ChildProcess, Pending
from kvxferd.tooling.content import RequestBlocks
from kvxferd.tooling.daemon_process import DaemonProcess
from kvxferd.tooling.engine_pair import ROLES, EnginePair, Role
from kvxferd.tooling.owned_process import stop_all
from kvxferd.tooling.work_directory import make_work_directory

T = TypeVar("T")
Child = ChildProcess[DemoRank]

PUBLISHER_RANK = Rank(0, 0)
# With `--keep`: what an operator looks at moves, and a core stays free.
KEEP_GAP_S = 0.25
LOG_POLL_S, LOG_TIMEOUT_S = 0.02, 30.0


class _Serving(msgspec.Struct, tag_field="event", tag="serving"):
    """The log line of a daemon that serves."""

    http: str


class Demo:
    """Two daemons and the processes of the ranks, in a directory that is removed with them.

    One pair of engines is registered at a time; the processes are those of the pair with the most ranks.
    """

    def __init__(self, pairs: Sequence[EnginePair], say: Callable[[str], None]) -> None:
        """`say` shows a line."""
        self._places = {(role, rank) for pair in pairs for role in ROLES for rank in pair.engine(role)}
        self._say = say
        self._directory = make_work_directory("kvxferd-demo-")
        self._num_requests = 0
        self._began = time.monotonic()
        self._daemons_ready_s = 0.0  # 0: they have not been ready yet
        self.daemons: dict[Role, DaemonProcess] = {}
        self._ranks: dict[tuple[Role, Rank], Child] = {}

    def start(self) -> None:
        """Start every process; `run` waits for them."""
        self._say(f"starting two daemons and {len(self._places)} processes of engines")
        for role in ROLES:
            flags = ["--http-bind", "127.0.0.1:0"] if role == "decode" else []
            self.daemons[role] = DaemonProcess(self._directory / role, flags)
        for role, rank in sorted(self._places):
            log = self._directory / f"{role}.{rank.pp_rank}.{rank.tp_rank}.log"
            self._ranks[role, rank] = ChildProcess(DemoRank, log)

    def run(self, pair: EnginePair, num_requests: int, damage: str = "") -> DemoResults:
        """Register the pair in place of the one before, and move requests. What fails is in the results."""
        results = DemoResults(pair, num_requests)
        try:
            self._register_all(pair, results)
            self._say(f"moving {num_requests} requests: {pair.prefill} -> {pair.decode}")
            for number in range(num_requests):
                self._move_request(pair, results, damage if number == 0 else "")
                self._say(results.describe_last())
            results.ways = self._ways(pair)
        except KvxferdError as error:
            results.error = f"{error.message}\n{self._log_tails()}"
        return results

    def keep_going(self, pair: EnginePair) -> DemoResults:
        """Register the pair and move requests until KeyboardInterrupt; return at the first that is wrong."""
        results = DemoResults(pair, 0)
        try:
            self._register_all(pair, results)
            while results.is_right:
                self._move_request(pair, results)
                time.sleep(KEEP_GAP_S)
        except KvxferdError as error:
            results.error = f"{error.message}\n{self._log_tails()}"
        return results

    def stop(self) -> None:
        """Stop all, ranks first; afterwards no process and no directory is left."""
        stop_all(self._ranks.values())
        stop_all(self.daemons.values())
        shutil.rmtree(self._directory, ignore_errors=True)

    def _register_all(self, pair: EnginePair, results: DemoResults) -> None:
        """Wait for the daemons, and register every rank of the pair."""
        if not self._daemons_ready_s:
            for daemon in self.daemons.values():
                daemon.wait_ready()
            self._daemons_ready_s = time.monotonic() - self._began
            self._say(f"look: http://{self._http_address()}")
        results.daemons_ready_s = self._daemons_ready_s
        began = time.monotonic()
        for pending in [rank.start(DemoRank.close) for rank in self._ranks.values()]:
            pending.result()
        for role in ROLES:
            self._call_all(role, pair, partial(self._register, role, pair))
        results.registered_s = time.monotonic() - began

    def _move_request(self, pair: EnginePair, results: DemoResults, damage: str = "") -> None:
        """Move one request: write and publish it, pull and check it, release it."""
        number = self._num_requests
        self._num_requests += 1
        name = f"req-{number}"
        held = {role: RequestBlocks(number, pair.block_ids(role, number), pair.num_tokens) for role in ROLES}
        refs = self._call_all(
            *("prefill", pair),
            lambda rank, child: child.start(DemoRank.prefill, name, held["prefill"], rank == PUBLISHER_RANK),
        )
        ref = refs[PUBLISHER_RANK]
        assert ref is not None
        damaged = {PUBLISHER_RANK: damage}
        pulled = self._call_all(
            *("decode", pair),
            lambda rank, child: child.start(
                DemoRank.pull_and_check, ref, held["decode"], damaged.get(rank, "")
            ),
        )
        results.add_request(pulled)
        if not all(one.pulled for one in pulled.values()):
            self._ranks["prefill", PUBLISHER_RANK].call(DemoRank.unpublish, ref)
        self._call_all("prefill", pair, lambda rank, child: child.start(DemoRank.await_release, [name]))

    def _register(self, role: Role, pair: EnginePair, rank: Rank, child: Child) -> Pending[float]:
        spec, layout = pair.engine(role)[rank]
        return child.start(DemoRank.register, self.daemons[role].worker_socket, spec, layout)

    def _call_all(
        self, role: Role, pair: EnginePair, start: Callable[[Rank, Child], Pending[T]]
    ) -> dict[Rank, T]:
        """Call every rank of an engine, side by side; return their results. Raises KvxferdError."""
        started = {rank: start(rank, self._ranks[role, rank]) for rank in pair.engine(role)}
        return {rank: pending.result() for rank, pending in started.items()}

    def _ways(self, pair: EnginePair) -> dict[str, int]:
        """Return the bytes of the pair's latest pulls by the way in which they were read."""
        path = f"/v1/history?kind=pull&engine={pair.name}-decode&limit=512"
        ways = Counter[str]()
        for record in self.daemons["decode"].control.get(path)["records"]:
            ways.update(record["ways"])
        return dict(ways)

    def _http_address(self) -> str:
        """Return where the decode daemon serves HTTP: it has taken a free port, and logs it."""
        daemon = self.daemons["decode"]
        deadline = time.monotonic() + LOG_TIMEOUT_S
        while daemon.exit_code is None and time.monotonic() < deadline:
            for line in daemon.log.read_bytes().splitlines():
                with suppress(msgspec.DecodeError):  # a library's, or one that is half written
                    return msgspec.json.decode(line, type=_Serving).http
            time.sleep(LOG_POLL_S)
        raise KvxferdError(f"cannot go on: the log of the {daemon.name} daemon names no address for HTTP")

    def _log_tails(self) -> str:
        """Return the last lines of both daemons' logs."""
        return "\n".join(f"--- {role} daemon\n{daemon.log_tail()}" for role, daemon in self.daemons.items())
