"""Sleep mode: nobody maps a cache while it is away, and it is registered again when it is back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fleet import DaemonUnderTest
from sides import EngineUnderTest

from kvxferd.integrations.vllm import sleep

Make = Callable[..., EngineUnderTest]


def test_a_sleeping_cache_is_mapped_by_nobody_and_comes_back(engine: Make, daemon: DaemonUnderTest) -> None:
    prefill, decode = engine("prefill", publishes=True), engine("decode")
    woken: list[str] = []

    def export_again():  # type: ignore[no-untyped-def]
        woken.append("decode")
        return decode.region()

    sleep.watch(decode.worker, export_again)
    try:
        before = len(_mappings(daemon))
        sleep.fall_asleep()
        sleep.fall_asleep()  # a second level of sleep
        assert len(_mappings(daemon)) == before - 1
        sleep.wake_up(["weights"])
        assert not woken, "the cache is not back yet"
        sleep.wake_up(None)
        assert woken == ["decode"]
    finally:
        sleep.forget(decode.worker)
    params = prefill.prefill("p-1", 8, [1, 2], fill=6)
    assert params is not None
    decode.decode("d-1", 8, [12, 13], params)
    assert not decode.step_until(lambda r: bool(r.received), "the pull is over").bad_blocks
    assert (decode.bytes[[12, 13]] == 6).all()


def _mappings(daemon: DaemonUnderTest) -> list[str]:
    """The test's caches that movers map."""
    return [
        line
        for pid in daemon.movers()
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "test-vllm" in line
    ]
