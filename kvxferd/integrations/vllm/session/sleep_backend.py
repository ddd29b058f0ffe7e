"""vLLM's default sleep-mode backend, which also suspends and resumes this worker's rank."""

from __future__ import annotations

from vllm.device_allocator.sleep_mode_backend import CuMemBackend

from kvxferd.integrations.vllm.session import sleep


class KvxferdSleepBackend(CuMemBackend):  # type: ignore[misc]
    """Suspends this worker's rank around sleep: a source unmapped under a reader would kill its mover."""

    def suspend(self, level: int = 1) -> None:
        """Free the memory once no other process maps it; raises KvxferdError (deadline), nothing freed."""
        sleep.suspend_workers()
        super().suspend(level)

    def resume(self, tags: list[str] | None = None) -> None:
        """Allocate the memory again; if the cache is included, register the rank again."""
        super().resume(tags)
        sleep.resume_workers(tags)

    def discard(self, tags: tuple[str, ...]) -> None:
        """Discard tagged memory; the cache only once no other process maps it."""
        if sleep.CACHE_TAG in tags:
            sleep.suspend_workers()
        super().discard(tags)
