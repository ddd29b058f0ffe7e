"""The daemon: connects the core with its sockets and movers, runs them, and closes them in order."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import structlog
import uvloop

from kvxferd.config import LoadedConfig, MergedConfig, merge_reloaded, settings_in_effect, split_endpoint
from kvxferd.control.core_settings import settings_of
from kvxferd.control.effect_runner import EffectRunner, Recorders
from kvxferd.control.fair_thread import FairThread
from kvxferd.control.fd_budget import (
    fd_warnings,
    max_http_connections,
    max_memory_fds_of,
    raise_fd_limit,
    release_reserved_fds,
)
from kvxferd.control.http_server import HttpServer
from kvxferd.control.mover_exits import MoverExits
from kvxferd.control.node_admin import NodeAdmin, ReloadResult
from kvxferd.control.ownership_file import OwnershipFile
from kvxferd.control.peer_admission import PeerAdmission
from kvxferd.control.peer_socket import PeerSocket
from kvxferd.control.turns import Turns
from kvxferd.control.worker_socket import WorkerSocket
from kvxferd.core.allowlist import PeerAllowlist
from kvxferd.core.events import (
    AllowlistChanged,
    DrainRequested,
    OwnershipsLoaded,
)
from kvxferd.core.node import Node
from kvxferd.decision_loop import DecisionLoop
from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import BootId, Endpoint
from kvxferd.mover.backends import Backend
from kvxferd.mover.supervisor.processes import MoverProcesses
from kvxferd.run_directory import RunDirectory
from kvxferd.sd_notify import SdNotifier
from kvxferd.telemetry.history import History
from kvxferd.telemetry.late_timers import TimerWatch
from kvxferd.telemetry.logs import operator_log, set_log_level
from kvxferd.telemetry.metrics import Metrics
from kvxferd.telemetry.mover_usage import MoverReading
from kvxferd.telemetry.samples import Samples
from kvxferd.telemetry.traces.tracer import Tracer
from kvxferd.threads import on_thread
from kvxferd.wire.endpoint import with_key
from kvxferd.wire.worker import Farewell

log = structlog.get_logger()

STOP_S = 10.0  # after a drain, for closing what is open and ending the movers
WARNINGS_EACH_S = 0.9  # at every second turn of the timer
PREDECESSOR_WAIT_S = 10.0  # the kernel kills a dead daemon's movers; the unmap may be slow


class Daemon:
    """The daemon of one node. `run` returns the exit code."""

    def __init__(
        self,
        loaded: LoadedConfig,
        read_config: Callable[[], LoadedConfig] | None = None,
        config_path: str = "",
    ) -> None:
        """`read_config` reads the same sources again for a reload.

        `config_path`: of the file among those sources, "" where there is none.
        """
        self._loaded = loaded
        self._config = config = loaded.config
        self._config_path = config_path
        self._read_config = read_config or (lambda: loaded)
        self._has_node = False
        self._boot = BootId(secrets.token_hex(4))
        self._on_event = DecisionLoop(
            lambda: self._node,
            lambda effect: self._effects.perform(effect),  # noqa: PLW0108  (it is made with the movers)
            self._after_events,
        ).feed
        self._sd_notifier = SdNotifier(os.environ)
        self._stopping = asyncio.Event()
        self._idle = asyncio.Event()
        self._metrics = Metrics(
            by_engine=config.metrics.by_engine,
            by_peer=config.metrics.by_peer,
            count_warnings=lambda: self._admin.warning_list.counts(),  # noqa: PLW0108  (it is made later)
            is_ready=lambda: not self._admin.readiness(),
            movers=self._read_movers,
        )
        self._recorders = Recorders(History(), self._metrics, Samples())
        self._planning = FairThread("plans")
        self._has_idled = False  # no event since the last turn of the timer
        self._timer_watch = TimerWatch(self._on_tick, self._metrics.record_late_timer, self._is_idle)
        limits, turns = config.limits, Turns()
        self._worker_socket = WorkerSocket(
            config.worker, self._on_event, limits.max_sessions, max_memory_fds_of(limits), turns
        )
        self._peer_admission = PeerAdmission(
            config.peer,
            self._use_allowlist,
            lambda: self._peer_socket.shut_connections(),  # noqa: PLW0108  (it is made below)
        )
        self._peer_socket = PeerSocket(
            config.peer.bind,
            self._on_event,
            lambda: self._node,
            self._peer_admission.allowlist,
            self._peer_admission.key,
            turns=turns,
        )

    # --- start and stop

    async def run(self) -> int:
        """Serve until a signal or a request, then drain. Raises ConfigError if the daemon cannot start."""
        self._watch_signals()
        async with AsyncExitStack() as closing:
            run_directory = RunDirectory(Path(self._config.node.run_dir), self._config.worker.socket)
            closing.callback(run_directory.close)
            await run_directory.wait_for_movers(PREDECESSOR_WAIT_S, self._stopping)
            if self._stopping.is_set():
                operator_log.info("stopped", boot=self._boot)
                return 0
            self._start_node(run_directory, closing)
            self._start_tracer(closing)
            await self._start_movers(run_directory.movers_lock_fd, closing)
            fd_limit = raise_fd_limit()
            await self._start_http(fd_limit, closing)
            self._start_worker_socket(closing)
            # What is found now began with the daemon: `configuration warning` logs it.
            self._admin.warning_list.renew(is_logged=False)
            self._timer_watch.start()
            closing.callback(self._timer_watch.stop)
            self._report_serving(fd_limit)
            # These run first at shutdown: a daemon without free descriptors also stops in order.
            closing.callback(release_reserved_fds)
            closing.callback(self._peer_socket.stop_listening)
            self._peer_admission.watch()
            closing.callback(self._peer_admission.stop)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])  # `kvxferd serve` has blocked it
            await self._stopping.wait()
            await self._wait_drained()
        operator_log.info("stopped", boot=self._boot)
        return 0

    def _start_node(self, run_directory: RunDirectory, closing: AsyncExitStack) -> None:
        """Bind the peer socket, whose port is part of the endpoint, and make the core."""
        self._peer_socket.start()
        closing.callback(self._peer_socket.stop)
        self._node = Node(
            boot=self._boot,
            endpoint=self._advertised_endpoint(),
            settings=settings_of(self._config, self._peer_admission.allowlist),
            new_token=lambda: secrets.token_hex(16),
        )
        self._has_node = True
        closing.callback(self._planning.close)
        self._ownership_file = OwnershipFile(run_directory.ownership_path, self._node.owners.saved_ranks)
        closing.push_async_callback(self._ownership_file.close)

    def _start_tracer(self, closing: AsyncExitStack) -> None:
        """Export spans, if a collector is set. Raises ConfigError if the packages for it are missing."""
        endpoint = self._config.tracing.endpoint
        if not endpoint:
            return
        from kvxferd.telemetry.traces.otlp import OtlpExporter  # imports opentelemetry

        exporter = OtlpExporter(endpoint, self._boot, self._node.context.endpoint)
        self._recorders.tracer = tracer = Tracer(exporter.export, exporter.close)
        tracer.start()
        closing.push_async_callback(on_thread, tracer.close, "traces-end")

    async def _start_movers(self, lock_fd: int, closing: AsyncExitStack) -> None:
        self._make_movers(lock_fd)
        closing.push_async_callback(self._movers.stop)
        self._movers.start_forkserver()

    def _make_movers(self, lock_fd: int) -> None:
        config = self._config.mover
        self._mover_exits = MoverExits(self._node, self._worker_socket)
        self._movers = MoverProcesses(
            self._on_event,
            self._mover_exits.record,
            lock_fd=lock_fd,
            environment=config.environment,
            library=config.library,
            backend=Backend(config.backend, config.backend_parameters),
        )
        self._effects = EffectRunner(
            self._worker_socket,
            self._peer_socket,
            self._movers,
            self._ownership_file,
            self._planning,
            self._recorders,
            self._on_event,
        )

    async def _start_http(self, fd_limit: int, closing: AsyncExitStack) -> None:
        self._admin = NodeAdmin(
            self._node,
            self._recorders.history,
            self._on_event,
            self.drain,
            self.reload,
            self._recorders.samples,
            checks=(
                self._timer_watch.warnings,
                self._peer_socket.authenticator.warnings,
                self._peer_admission.warnings,
            ),
            config_path=self._config_path,
            settings=lambda: settings_in_effect(self._loaded),
        )
        self._http = HttpServer(self._config, self._admin, self._metrics, max_http_connections(fd_limit))
        closing.push_async_callback(self._http.stop)
        await self._http.start()

    def _start_worker_socket(self, closing: AsyncExitStack) -> None:
        # Before the first session: the first to register must not get another user's engine id.
        self._on_event(OwnershipsLoaded(self._ownership_file.read()))
        self._worker_socket.start()
        closing.push_async_callback(self._stop_workers)

    def _report_serving(self, fd_limit: int) -> None:
        """Log what is served, and notify systemd."""
        found = (warning.text for warning in self._admin.warnings())
        for warning in (*found, *fd_warnings(self._config.limits, fd_limit)):
            log.warning("configuration warning", text=warning)
        log.info(
            "serving",
            boot=self._boot,
            endpoint=self._node.context.endpoint,
            worker_socket=self._config.worker.socket,
            http="{}:{}".format(*self._http.tcp_address) if self._http.tcp_address else "",
            pid=os.getpid(),
        )
        self._sd_notifier.send("READY=1", f"STATUS=serving {self._node.context.endpoint}")

    def _advertised_endpoint(self) -> Endpoint:
        if self._config.peer.advertise:
            host, port = split_endpoint(self._config.peer.advertise)
            _, bound = split_endpoint(self._peer_socket.bound_endpoint)
            address = Endpoint(f"tcp://{host.lower()}:{port or bound}")
        else:
            address = Endpoint(self._peer_socket.bound_endpoint)
        return with_key(address, self._peer_admission.allowlist.own_key)

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self._on_signal, name)
        loop.add_signal_handler(signal.SIGQUIT, self._on_quit)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        # Their default action ends the process, and a log rotation may send them.
        for name in (signal.SIGUSR1, signal.SIGUSR2):
            loop.add_signal_handler(name, _log_ignored_signal, name)

    def _on_hangup(self) -> None:
        try:
            self.reload()
        except KvxferdError as error:
            log.error("reload failed", reason=error.message)
        except Exception:
            log.exception("reload incomplete")

    def _on_quit(self) -> None:
        operator_log.warning("drain skipped", signal=signal.SIGQUIT.name)
        self._idle.set()
        self.drain()

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stopping.is_set():
            operator_log.warning("drain skipped", signal=number.name)
            self._idle.set()
        self.drain()

    async def _wait_drained(self) -> None:
        """Wait until no pull or transfer is left, for at most `drain.limit_s`."""
        operator_log.info(
            "draining", pulls=len(self._node.pulls), transfers=len(self._node.published.table.live)
        )
        patience_us = int((self._config.drain.limit_s + STOP_S) * 1e6)
        self._sd_notifier.send("STOPPING=1", "STATUS=draining", f"EXTEND_TIMEOUT_USEC={patience_us}")
        try:
            async with asyncio.timeout(self._config.drain.limit_s):
                await self._idle.wait()
        except TimeoutError:
            pulls, transfers = len(self._node.pulls), len(self._node.published.table.live)
            log.warning("drain limit reached", pulls=pulls, transfers=transfers)
        self._admin.set_drained()

    async def _stop_workers(self) -> None:
        farewell = Farewell(code=Code.DRAINING, message="this daemon stops; it may be back soon")
        for session in list(self._node.sessions):
            self._worker_socket.send(session, farewell)
        self._worker_socket.stop()
        # The worker socket releases sessions on the loop's next turn.
        await asyncio.sleep(0)

    # --- effects

    def _after_events(self) -> None:
        self._has_idled = False
        if self._stopping.is_set() and self._node.is_idle:
            self._idle.set()

    def _is_idle(self) -> bool:
        was_idle, self._has_idled = self._has_idled, True
        return was_idle

    def _on_tick(self, lag_s: float) -> None:
        self._metrics.record_loop_lag(lag_s)
        self._recorders.samples.tick()
        self._admin.warning_list.renew(WARNINGS_EACH_S)

    def _read_movers(self) -> MoverReading:
        pool, assigned = self._node.mover_pool, self._node.movers.num_children()
        states = {"starting": pool.num_starting, "ready": pool.num_ready, "assigned": assigned}
        exits = self._mover_exits.counts.copy()
        return MoverReading(states, exits, self._movers.forkserver_pid, self._movers.pids())

    def reload(self) -> ReloadResult:
        """Read the configuration again. Raises ConfigError if it is invalid; then nothing changes."""
        self._sd_notifier.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            merged = merge_reloaded(self._loaded, self._read_config())
            reloaded = self._apply_config(merged)
        finally:
            self._sd_notifier.send("READY=1")
        operator_log.info("configuration reloaded", **msgspec.structs.asdict(reloaded))
        return reloaded

    def _apply_config(self, merged: MergedConfig) -> ReloadResult:
        config = merged.loaded.config
        # Each part compares with its own state: if one raises, the next reload applies the rest.
        self._peer_admission.read_keys(config.peer)  # raises, and then nothing changes
        closed = self._worker_socket.set_allowed(config.worker)
        used = self._peer_admission.apply(config.peer)
        if "log.level" in merged.changed:
            set_log_level(config.log.level)
        self._loaded, self._config = merged.loaded, config
        return ReloadResult(
            changed=merged.changed,
            ignored=merged.ignored,
            dropped_peers=used.dropped_peers,
            closed_sessions=closed,
            closes_connections=used.closes_connections,
        )

    def _use_allowlist(self, allowlist: PeerAllowlist) -> list[Endpoint]:
        """Admit these peers. Return those that are dropped."""
        before = self._node.peers.endpoints()
        self._peer_socket.set_allowlist(allowlist)
        self._on_event(AllowlistChanged(allowlist))
        return sorted(before - self._node.peers.endpoints())

    def drain(self) -> None:
        """Refuse new work, and stop once running pulls and published transfers have ended."""
        self._stopping.set()
        if not self._has_node:
            return  # still waiting for the predecessor's movers: nothing is open yet
        self._on_event(DrainRequested())


def _log_ignored_signal(number: signal.Signals) -> None:
    operator_log.info("signal ignored", signal=number.name)


def serve(
    loaded: LoadedConfig,
    read_config: Callable[[], LoadedConfig],
    config_path: str = "",
) -> int:
    """Run the daemon of this node until it is stopped. Raises ConfigError if it cannot start."""
    raise_fd_limit()

    async def run() -> int:
        try:
            return await Daemon(loaded, read_config, config_path).run()
        finally:
            release_reserved_fds()  # the loop opens a socket pair when it closes

    return uvloop.run(run())
