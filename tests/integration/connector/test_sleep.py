"""Sleep mode: nobody maps a cache while it is away, and it is registered again when it is back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvxferd.errors import EngineError, KvxferdError
from kvxferd.integrations.vllm import sleep
from tests.support.connector_harness import EngineUnderTest
from tests.support.daemon_fleet import DaemonUnderTest

Make = Callable[..., EngineUnderTest]


def test_a_sleeping_cache_is_mapped_by_nobody_and_comes_back(engine: Make, daemon: DaemonUnderTest) -> None:
    prefill, decode = engine("prefill", publishes=True), engine("decode")
    woken: list[str] = []

    def export_again():  # type: ignore[no-untyped-def]
        woken.append("decode")
        return decode.region()

    sleep.add_worker(decode.worker, export_again)
    try:
        before = len(_mappings(daemon))
        sleep.suspend_workers()
        sleep.suspend_workers()  # a second level of sleep
        assert len(_mappings(daemon)) == before - 1
        sleep.resume_workers(["weights"])
        assert not woken, "the cache is not back yet"
        sleep.resume_workers(None)
        assert woken == ["decode"]
    finally:
        sleep.remove_worker(decode.worker)
    params = prefill.prefill("p-1", 8, [1, 2], fill=6)
    assert params is not None
    decode.decode("d-1", 8, [12, 13], params)
    assert not decode.step_until(lambda r: bool(r.received), "the pull is over").failed_block_ids
    assert (decode.bytes[[12, 13]] == 6).all()


def test_a_rank_that_was_let_go_of_after_its_engine_gave_up_waiting_is_asleep(
    engine: Make, daemon: DaemonUnderTest
) -> None:
    decode = engine("decode")
    os.kill(daemon.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(KvxferdError, match="has not let go"):
            decode.worker.suspend(timeout_s=0.2)
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)
    decode.step_until(lambda _: not decode.rank.memory_in_use, "the daemon lets go")
    decode.step()
    decode.worker.suspend(timeout_s=5)
    decode.worker.resume(decode.region())
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


def _mappings(daemon: DaemonUnderTest) -> list[str]:
    """The test's caches that movers map."""
    return [
        line
        for pid in daemon.movers()
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "test-vllm" in line
    ]
