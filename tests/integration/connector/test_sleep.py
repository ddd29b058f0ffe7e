"""Sleep mode: nobody maps a cache while it is away, and it is registered again when it is back."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.integrations.vllm.session import sleep
from kvxferd.integrations.vllm.session.worker import ConnectorWorker
from tests.support.connector_harness import EngineUnderTest
from tests.support.nodes.daemon import Daemon

Make = Callable[..., EngineUnderTest]


def test_a_sleeping_cache_is_mapped_by_nobody_and_comes_back(engine: Make, daemon: Daemon) -> None:
    prefill, decode = engine("prefill", publishes=True), engine("decode")
    sleep.add_worker(decode.worker, decode.regions())
    try:
        before = len(_mappings(daemon))
        sleep.suspend_workers()
        sleep.suspend_workers()  # a second level of sleep
        assert len(_mappings(daemon)) == before - 1
        sleep.resume_workers(["weights"])
        assert decode.worker.is_suspended, "the cache is not back yet"
        sleep.resume_workers(None)
    finally:
        sleep.remove_worker(decode.worker)
    params = prefill.prefilled("p-1", 8, [1, 2], fill=6)
    decode.decode("d-1", 8, [12, 13], params)
    assert not decode.step_until(lambda r: bool(r.received), "the pull is over").failed
    assert (decode.bytes[[12, 13]] == 6).all()


def test_a_pool_of_its_own_gives_its_memory_back_after_the_movers_and_has_it_before_them(
    engine: Make,
) -> None:
    """vLLM's sleep mode frees what its own allocator made, and knows nothing of this pool."""
    decode = engine("decode")
    seen: list[tuple[str, bool]] = []

    class Pool:
        def release_memory(self) -> None:
            seen.append(("released", decode.rank.memory_in_use))

        def restore_memory(self) -> None:
            seen.append(("restored", decode.rank.memory_in_use))

    sleep.add_worker(decode.worker, decode.regions(), Pool())
    try:
        sleep.suspend_workers()
        sleep.resume_workers(["weights"])
        assert seen == [("released", False)]
        sleep.resume_workers(["kv_cache"])
        assert seen == [("released", False), ("restored", False)]
        assert decode.rank.memory_in_use
    finally:
        sleep.remove_worker(decode.worker)


def test_a_cache_whose_resume_had_no_reply_is_suspended_before_its_memory_is_given_back() -> None:
    """The client goes on trying: a mover may map the memory meanwhile, and would keep what it was."""
    calls: list[str] = []

    class Worker:
        is_suspended = False

        def suspend(self) -> None:
            calls.append("suspend")
            self.is_suspended = True

        def resume(self, regions: object) -> None:
            calls.append("resume")
            self.is_suspended = False
            raise KvxferdError("no reply", Code.DEADLINE)

    class Pool:
        def release_memory(self) -> None:
            calls.append("release")

        def restore_memory(self) -> None:
            calls.append("restore")

    worker = cast(ConnectorWorker, Worker())
    sleep.add_worker(worker, [], Pool())
    try:
        sleep.suspend_workers()
        with pytest.raises(KvxferdError, match="no reply"):
            sleep.resume_workers(None)
        sleep.resume_workers(None)  # it is under way
        sleep.suspend_workers()
    finally:
        sleep.remove_worker(worker)
    assert calls == ["suspend", "release", "restore", "resume", "suspend", "release"]


def test_memory_that_cannot_be_exported_again_stays_suspended(engine: Make) -> None:
    decode = engine("decode")
    decode.worker.suspend()
    (region,) = decode.regions()
    with pytest.raises(KvxferdError):
        decode.worker.resume([dataclasses.replace(region, device="cuda")])
    assert decode.worker.is_suspended
    decode.worker.suspend(timeout_s=1)
    decode.worker.resume([region])
    assert not decode.worker.is_suspended


@pytest.mark.parametrize("daemon", ["own"], indirect=True)
def test_a_rank_that_was_let_go_of_after_its_engine_gave_up_waiting_is_asleep(
    engine: Make, daemon: Daemon
) -> None:
    decode = engine("decode")
    daemon.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(KvxferdError, match="has not let go"):
            decode.worker.suspend(timeout_s=0.2)
    finally:
        daemon.send_signal(signal.SIGCONT)
    decode.step_until(lambda _: not decode.rank.memory_in_use, "the daemon lets go")
    decode.step()
    decode.worker.suspend(timeout_s=5)
    decode.worker.resume(decode.regions())
    decode.worker.suspend()
    assert not decode.rank.memory_in_use


@pytest.mark.parametrize(
    ("enabled", "backend", "devices", "is_refused"),
    [
        (True, "cumem", ["cuda", "cpu"], True),
        (True, "kvxferd", ["cuda"], False),
        (False, "cumem", ["cuda"], False),
        (True, "cumem", ["cpu"], False),
    ],
)
def test_sleep_that_the_daemon_would_not_hear_of_is_refused(
    enabled: bool, backend: str, devices: list[str], is_refused: bool
) -> None:
    model = SimpleNamespace(enable_sleep_mode=enabled, sleep_mode_backend=backend)
    with pytest.raises(EngineError, match="--sleep-mode-backend kvxferd") if is_refused else nullcontext():
        sleep.check_backend(model, devices, Untold)
    sleep.check_backend(model, devices, Told)


class Untold:
    """As vLLM 0.32 has its base class of connectors."""


class Told:
    """As 0.33 has it."""

    def unregister_kv_caches(self) -> None: ...


def _mappings(daemon: Daemon) -> list[str]:
    """The test's caches that movers map."""
    found: list[str] = []
    for pid in daemon.movers():
        with suppress(FileNotFoundError, ProcessLookupError):  # one that ended in the meantime maps nothing
            maps = Path(f"/proc/{pid}/maps").read_text()
            found += [line for line in maps.splitlines() if "test-vllm" in line]
    return found
