"""Daemons and rank processes that the tests of one process share, and what one test has of them."""

from __future__ import annotations

import os
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvxferd.config.schema import MoverConfig
from kvxferd.errors import KvxferdError
from kvxferd.layout import EngineSpec
from kvxferd.tooling.child_process import Pending
from tests.support.nodes.daemon import STOP_S, Daemon, Footprint, at_rest
from tests.support.nodes.rank_process import RankProcess, ranks_of
from tests.support.nodes.requests import spec_of
from tests.support.nodes.waiting import wait_until

START_S = 60.0
REST_S = 30.0
# A daemon with its movers has some 150 MB. Tests of one kind follow one another, and want four at most.
MAX_IDLE = 6
FACTS = {"num_kv_heads": 8, "head_dim": 16, "block_tokens": 16, "num_blocks": 64, "layout": "HND"}

Environ = tuple[tuple[str, str], ...]
How = Literal["register", "register_resident"]


def start_daemon(
    directory: Path, environ: Mapping[str, str] | None = None, flags: Sequence[str] = (), **how: Any
) -> Daemon:
    """Return a daemon that is ready. `how`: as of `Daemon`."""
    daemon = Daemon(directory, environ or {}, flags, **how)
    daemon.wait_ready()
    return daemon


@dataclass(frozen=True)
class SharedDaemon:
    """A daemon with its settings, and what it had when it was new."""

    environ: Environ
    daemon: Daemon
    before: Footprint


class Machines:
    """The daemons and rank processes of a session: idle ones are lent to one test after another.

    With KVXFERD_TEST_OWN=1 nothing is lent twice: a test's fault is then no fault of those before it.
    """

    def __init__(self, directory: Path, *, lends_again: bool = True, rest_s: float = REST_S) -> None:
        """`rest_s`: within which a daemon must come to rest after a test."""
        self._directory = directory
        self._lends_again = lends_again and not os.environ.get("KVXFERD_TEST_OWN")
        self._rest_s = rest_s
        self._idle: list[SharedDaemon] = []  # the one that was used last is last
        self._ranks: defaultdict[Environ, list[RankProcess]] = defaultdict(list)
        self._num_started = 0

    def borrow_daemon(self, environ: Environ) -> SharedDaemon:
        """Return a daemon with these settings that nobody else uses."""
        for shared in self._idle:
            if shared.environ == environ:
                self._idle.remove(shared)
                break
        else:
            shared = self._start(environ)
        shared.daemon.begin_test()
        return shared

    def _start(self, environ: Environ) -> SharedDaemon:
        self._num_started += 1
        daemon = start_daemon(self._directory / str(self._num_started), dict(environ))
        num_warm = int(dict(environ).get("KVXFERD_MOVER_POOL_SIZE", MoverConfig().pool_size))
        wait_until(lambda: len(daemon.movers()) == num_warm, "movers are warm", START_S)
        return SharedDaemon(environ, daemon, Footprint.of(daemon))

    def give_back_daemon(self, shared: SharedDaemon) -> None:
        """Keep a daemon for the next test. One that does not come to rest ends: AssertionError."""
        daemon = shared.daemon
        left = ["it died"]

        def rests() -> bool:
            with suppress(OSError, KvxferdError):  # it dies just now
                left[:] = at_rest(daemon, shared.before) if daemon.exit_code is None else ["it died"]
            return not left

        try:
            wait_until(rests, "the daemon at rest", self._rest_s)
        except AssertionError as error:
            stop_daemon(daemon)
            raise AssertionError(f"the test left at {daemon.directory}: {left}") from error
        self._idle.append(shared)
        while len(self._idle) > MAX_IDLE * self._lends_again:
            _stop_idle(self._idle.pop(0))

    def borrow_rank(self, environ: Environ) -> RankProcess:
        """Return a process that has registered nothing, with these variables."""
        if self._ranks[environ]:
            return self._ranks[environ].pop()
        self._num_started += 1
        self._directory.mkdir(parents=True, exist_ok=True)
        return RankProcess(self._directory / f"rank-{self._num_started}.log", dict(environ))

    def give_back_rank(self, environ: Environ, rank: RankProcess) -> None:
        """Keep a process for the next test, if it lives and is as new."""
        if self._lends_again and rank.leave():
            self._ranks[environ].append(rank)
        else:
            rank.stop()

    def stop(self) -> None:
        """End everything."""
        with ExitStack() as stack:
            for shared in self._idle:
                stack.callback(_stop_idle, shared)
            for rank in [rank for ranks in self._ranks.values() for rank in ranks]:
                stack.callback(rank.stop)


class Fleet:
    """What one test has of `Machines`, and daemons of its own; `stop` checks that nothing is left of it.

    Generations are this test's: the next one's engines may have the same names.
    """

    def __init__(self, directory: Path, machines: Machines | None = None) -> None:
        self._machines = machines or Machines(directory, lends_again=False)
        self._directory = directory
        self._suffix = secrets.token_hex(4)
        self._shared: dict[str, SharedDaemon] = {}
        self._own: list[Daemon] = []
        self._ranks: list[tuple[Environ, RankProcess]] = []

    def shared(self, name: str, **environ: str) -> Daemon:
        """Return a daemon that other tests use too, though not meanwhile: it is to be left as it was."""
        settings = tuple(sorted(environ.items()))
        if name not in self._shared:
            self._shared[name] = self._machines.borrow_daemon(settings)
        assert self._shared[name].environ == settings, f"{name} has other settings"
        return self._shared[name].daemon

    def daemon(
        self,
        name: str,
        *flags: str,
        prefix: Sequence[str] = (),
        module: str = "kvxferd.cli",
        **environ: str,
    ) -> Daemon:
        """Return one that ends with this test."""
        directory = self._directory / name
        daemon = start_daemon(directory, environ, flags, prefix=prefix, module=module)
        self._own.append(daemon)
        return daemon

    def generation(self, tag: str = "g1") -> str:
        """Return the generation of this test's engines whose spec has that one."""
        return f"{tag}-{self._suffix}"

    def rank(self, **environ: str) -> RankProcess:
        settings = tuple(sorted(environ.items()))
        rank = self._machines.borrow_rank(settings)
        self._ranks.append((settings, rank))
        return rank

    def register(
        self,
        daemon: Daemon,
        spec: EngineSpec,
        how: How = "register",
        rank: RankProcess | None = None,
        **facts: Any,
    ) -> RankProcess:
        """Register one rank, of this test's generation, in a process or in that one."""
        rank = rank or self.rank()
        self.start_registering(daemon, spec, rank, how, **facts).result()
        return rank

    def engine(
        self,
        daemon: Daemon,
        spec: EngineSpec,
        how: How = "register",
        environ: Mapping[str, str] | None = None,
        **facts: Any,
    ) -> list[RankProcess]:
        """Register all ranks of an engine at one daemon, as `register` does."""
        ranks = {own: self.rank(**environ or {}) for own in ranks_of(spec)}
        for pending in [self.start_registering(daemon, *one, how, **facts) for one in ranks.items()]:
            pending.result()
        return list(ranks.values())

    def pair(
        self, prefill: Daemon, decode: Daemon | None = None, how: How = "register"
    ) -> tuple[RankProcess, RankProcess]:
        """Register two engines of one rank, "prefill" and "decode", at one daemon or at two."""
        (source,) = self.engine(prefill, spec_of("prefill"), how)
        (sink,) = self.engine(decode or prefill, spec_of("decode"), how)
        return source, sink

    def start_registering(
        self, daemon: Daemon, spec: EngineSpec, rank: RankProcess, how: How = "register", **facts: Any
    ) -> Pending[float]:
        """Register without waiting; all that is not in `facts` is as in FACTS."""
        spec = msgspec.structs.replace(spec, generation=self.generation(spec.generation))
        start = rank.start_registering if how == "register" else rank.start_registering_resident
        return start(daemon.worker_socket, spec, **(FACTS | facts))

    def stop(self) -> None:
        """Give back what is at rest. Raises AssertionError if something is not, or left something."""
        with ExitStack() as stack:  # what raises does not keep the rest from its end
            for shared in self._shared.values():
                stack.callback(self._machines.give_back_daemon, shared)
            for daemon in self._own:
                stack.callback(stop_daemon, daemon)
            for settings, rank in self._ranks:
                stack.callback(self._machines.give_back_rank, settings, rank)


def _stop_idle(shared: SharedDaemon) -> None:
    code = stop_daemon(shared.daemon)
    assert code == 0, f"a daemon that nobody used ended with {code}: {shared.daemon.log_tail()}"


def stop_daemon(daemon: Daemon) -> int:
    """End a daemon, and check that nothing of it is left. Return its exit code."""
    code = daemon.stop(STOP_S)
    assert not daemon.leftovers(), daemon.leftovers()
    return code
