"""Sleep mode: the daemon unmaps a worker's memory before vLLM frees it, and maps it again after.

vLLM selects sleep-mode backends by name: ``--enable-sleep-mode --sleep-mode-backend kvxferd`` is vLLM's
default backend, but suspends the ranks first. The plugin entry point of this package registers it. From
0.33 on vLLM calls the connector itself, whatever the backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from kvxferd.errors import Code, EngineError
from kvxferd.integrations.vllm.session.worker import ConnectorWorker
from kvxferd.layout import TensorRegion

BACKEND = "kvxferd"
CACHE_TAG = "kv_cache"


class SleepingPool(Protocol):
    """The cache's own pool, which vLLM's sleep mode does not know."""

    def release_memory(self) -> None:
        """Give the memory back to the device. Idempotent."""

    def restore_memory(self) -> None:
        """Put new memory under the same addresses. Idempotent."""


class _SleepingCache(NamedTuple):
    regions: Sequence[TensorRegion]
    pool: SleepingPool | None


_workers: dict[ConnectorWorker, _SleepingCache] = {}
_suspended: set[ConnectorWorker] = set()


def check_backend(model_config: Any, devices: Iterable[str], connector: type) -> None:
    """Raise EngineError (config-invalid) for an engine whose sleep would free memory that the daemon maps.

    `devices` are torch's types of the devices of its cache; sleep does not free host memory.
    `connector` is vLLM's base class of connectors; its methods show whether vLLM calls them around sleep.
    """
    if not getattr(model_config, "enable_sleep_mode", False) or set(devices) <= {"cpu"}:
        return
    if hasattr(connector, "unregister_kv_caches"):
        return
    backend = getattr(model_config, "sleep_mode_backend", "")
    if backend != BACKEND:
        raise EngineError(
            f"cannot register the cache: sleep mode's backend {backend!r} frees it while others map it, and "
            f"they would go on with what it was; add --sleep-mode-backend {BACKEND}",
            Code.CONFIG_INVALID,
        )


def add_worker(
    worker: ConnectorWorker, regions: Sequence[TensorRegion], pool: SleepingPool | None = None
) -> None:
    """Suspend and resume the worker's rank with this process's sleep mode from now on.

    `regions`: its allocations. `pool`: where its cache lies, if vLLM's own allocator does not free and
    restore it.
    """
    _workers[worker] = _SleepingCache(regions, pool)


def remove_worker(worker: ConnectorWorker) -> None:
    """Remove a worker whose rank is gone."""
    _workers.pop(worker, None)
    _suspended.discard(worker)


def suspend_workers() -> None:
    """Return once no other process maps this process's caches. Raises KvxferdError(deadline).

    A cache in a pool of its own has given its memory back then.
    """
    for worker in _workers.keys() - _suspended:
        worker.suspend()
        _suspended.add(worker)
    for worker in _suspended:
        if (pool := _workers[worker].pool) is not None:
            pool.release_memory()


def resume_workers(tags: Sequence[str] | None) -> None:
    """Register the caches again, if `tags` include them."""
    if tags is not None and CACHE_TAG not in tags:
        return
    for worker in list(_suspended):
        cache = _workers[worker]
        if cache.pool is not None:
            cache.pool.restore_memory()
        try:
            worker.resume(cache.regions)
        finally:
            if not worker.is_suspended:  # also without a reply: the client goes on trying
                _suspended.discard(worker)


def register_backend() -> None:
    """Register the backend with vLLM, as an entry point of ``vllm.general_plugins``."""
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    if BACKEND not in SleepModeBackendFactory._registry:  # every process loads plugins, some twice
        SleepModeBackendFactory.register_backend(
            BACKEND, "kvxferd.integrations.vllm.session.sleep_backend", "KvxferdSleepBackend"
        )
