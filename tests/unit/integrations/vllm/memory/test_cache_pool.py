"""The pool that vLLM is offered for its cache, over the fake driver and a stand-in for torch's GPU side."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvxferd.errors import Code, DeviceError
from kvxferd.integrations.vllm.memory.cache_pool import CachePool, PoolOffer, offer_pool, open_pool
from kvxferd.memory import driver_registry
from kvxferd.memory.driver_registry import open_driver
from tests.support.devices import used_bytes
from tests.support.fake_driver import FAKE, FAKE_DEVICES, GRANULARITY, FakeDriver


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A torch that sees two GPUs, of which the second is current. Returns the pools that are in use."""
    in_use: list[Any] = []

    @contextmanager
    def use_mem_pool(pool: Any) -> Iterator[None]:
        in_use.append(pool)
        yield
        in_use.remove(pool)

    @contextmanager
    def device(ordinal: int) -> Iterator[None]:
        yield

    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KVXFERD_DRIVER", FAKE)
    monkeypatch.setattr(torch._C, "_cuda_customAllocator", lambda *functions: functions, raising=False)
    monkeypatch.setattr(
        torch,
        "cuda",
        SimpleNamespace(
            is_available=lambda: True,
            current_device=lambda: 1,
            synchronize=lambda: None,
            use_mem_pool=use_mem_pool,
            device=device,
            MemPool=lambda allocator: ("pool", allocator),
        ),
    )
    return in_use


def test_vllm_is_offered_a_pool_on_its_own_device(gpu: list[Any]) -> None:
    offered = offer_pool("auto", is_child=False)
    assert offered.failure is None
    assert offered.pool is not None
    assert offered.pool.num_bytes == 0, "what was tried is given back"
    with offered.pool.context():
        assert len(gpu) == 1
    assert not gpu


def test_the_memory_of_the_pool_is_on_the_device_that_is_current() -> None:
    pool = open_pool(1).pool
    assert pool is not None
    block = pool.allocate(GRANULARITY)
    assert open_driver().device_of(block.address) == FAKE_DEVICES[1].uuid
    pool.release_memory()
    assert pool.num_bytes == 0
    pool.restore_memory()
    assert pool.num_bytes == GRANULARITY
    pool.close()


def test_a_device_that_cannot_export_has_no_pool_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()

    def refuse(handle: int) -> int:
        raise DeviceError("cannot export", Code.REGION_NOT_EXPORTABLE)

    monkeypatch.setattr(driver, "export", refuse)
    before = used_bytes(driver, FAKE_DEVICES[0].uuid)
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DeviceError, match="cannot export"):
        CachePool(FAKE_DEVICES[0].uuid, driver)
    assert used_bytes(driver, FAKE_DEVICES[0].uuid) == before
    assert len(os.listdir("/proc/self/fd")) == fds


def test_nothing_is_offered_or_explained_where_exported_memory_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert offer_pool("resident", is_child=False) == PoolOffer()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert offer_pool("auto", is_child=False) == PoolOffer()


def why_not(setting: str = "auto", *, is_child: bool = False) -> str:
    offered = offer_pool(setting, is_child=is_child)
    assert offered.pool is None
    return str(offered.failure)


def test_one_of_several_connectors_offers_a_pool_where_it_is_told_to() -> None:
    assert '"placement": "child"' in why_not(is_child=True)
    assert offer_pool("child", is_child=True).pool is not None


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_left_to_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512, expandable_segments: True")
    assert f"run: unset {name}" in why_not()


def test_rocm_is_not_offered_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "ROCm" in why_not()


def test_without_bindings_the_reason_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFERD_DRIVER", "cuda")
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    driver_registry._open_once.cache_clear()
    assert "cannot use a GPU without cuda-python" in why_not()


def test_a_torch_without_the_function_has_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_cuda_customAllocator")
    assert "torch makes no pool of it" in why_not()


def test_a_device_that_the_driver_does_not_show_has_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 7)
    assert "cannot use device 7" in why_not()
