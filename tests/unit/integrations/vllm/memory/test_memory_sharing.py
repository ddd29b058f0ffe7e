"""A rank's memory as the daemon maps it: adopted in place, or mirrored and copied."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import pytest
import torch

from kvxferd.client import BlockList
from kvxferd.errors import Code, DeviceError
from kvxferd.ids import RegionId
from kvxferd.integrations.vllm.layout.derivation import DerivedCaches, derive_layout
from kvxferd.integrations.vllm.layout.facts import (
    AttentionFacts,
    CacheGroup,
    CacheKind,
    LayerFacts,
    WorkerFacts,
)
from kvxferd.integrations.vllm.layout.groups import CacheGroups
from kvxferd.integrations.vllm.memory.gpu_placement import placements_for
from kvxferd.integrations.vllm.memory.memory_sharing import SharedCaches, device_region, share_memory
from kvxferd.layout import TensorRegion
from kvxferd.memory import MemoryPlacement, SealedMemory
from kvxferd.memory.device import DeviceMemory, ResidentMemory
from kvxferd.memory.driver import Driver
from kvxferd.memory.driver_registry import open_driver
from tests.support.devices import Segment, free_plain
from tests.support.fake_driver import FAKE
from tests.support.vllm_caches import layer_views

BLOCKS, LAYERS = 64, 3
BIG = (LAYERS, BLOCKS, 24, 32, 128)  # 36 MiB: glibc maps blocks of 32 MiB and more by themselves, always
MEDIUM = (LAYERS, BLOCKS, 2, 32, 128)
SMALL = (LAYERS, BLOCKS, 1, 4, 16)  # 24 KiB: of the heap


def derived_of(shape: tuple[int, ...], per_id: int = 1) -> tuple[list[torch.Tensor], DerivedCaches]:
    """Return tensors of one allocation, full of numbers, and what is derived of them."""
    layers, blocks, heads, tokens, content = shape
    views = layer_views("LBHNC", shape, torch.bfloat16)
    for number, view in enumerate(views):
        view.view(torch.int16).copy_(torch.arange(view.numel()).reshape(view.shape) % 30000 + number)
    facts = AttentionFacts(heads, content // 2, content // 2, "bfloat16", 2)
    names = [f"model.layers.{layer}.attn" for layer in range(layers)]
    worker = WorkerFacts(0, layers, layers, heads, num_blocks=blocks // per_id)
    groups = CacheGroups((CacheGroup(0, CacheKind.FULL, tokens * per_id),), 1)
    described = [LayerFacts(n, 0, facts, "FlashAttentionBackend") for n in names]
    return views, derive_layout(dict(zip(names, views, strict=True)), described, groups, worker)


@pytest.fixture
def opened() -> Iterator[list[SharedCaches]]:
    shared: list[SharedCaches] = []
    yield shared
    for one in shared:
        one.close()


def mapped(shared: SharedCaches) -> memoryview:
    """Return the only region as another process sees it."""
    (region,) = shared.regions
    assert isinstance(region.memory, SealedMemory)
    return memoryview(mmap.mmap(region.memory.fd, region.memory.size_bytes))[region.offset :]


def offset_of(derived: DerivedCaches, component: str, layer: int, block: int) -> int:
    (tensor,) = [t for t in derived.layout.tensors if (t.layer, t.component) == (layer, component)]
    return tensor.offset + block * tensor.block_stride


def test_memory_of_its_own_is_adopted_and_seen_by_others(opened: list[SharedCaches]) -> None:
    views, derived = derived_of(BIG)
    opened.append(share_memory(derived))
    (shared,) = opened
    assert shared.bounce_buffers is None
    assert shared.report == (
        "kv.0 (36.0 MiB on cpu) is adopted in place: the daemon maps it, nothing is copied",
    )
    (region,) = shared.regions
    assert region.memory.size_bytes >= derived.layout.regions[0].size_bytes
    other = mapped(shared)
    at = offset_of(derived, "v", 2, 5)
    assert other[at : at + 4] == views[2][5, 0, 0, 64:66].view(torch.uint8).numpy().tobytes()
    other[at : at + 2] = b"\x01\x02"
    assert views[2].view(torch.int16)[5, 0, 0, 64] == 0x0201


@pytest.mark.parametrize(
    ("shape", "adopt", "why"),
    [
        (MEDIUM, False, "copied through a shared buffer: adopt_cpu_memory is off"),
        (SMALL, True, "copied through a shared buffer: cannot adopt the memory at"),
    ],
)
@pytest.mark.parametrize("per_id", [1, 4])
def test_what_is_not_adopted_is_copied_block_by_block(
    shape: tuple[int, ...], adopt: bool, why: str, per_id: int, opened: list[SharedCaches]
) -> None:
    views, derived = derived_of(shape, per_id)
    opened.append(share_memory(derived, adopt=adopt))
    (shared,) = opened
    assert why in shared.report[0]
    assert shared.bounce_buffers is not None
    other = mapped(shared)
    block_bytes = views[0][0].numel() * 2

    def content(layer: int, kernel_block: int) -> bytes:
        at = offset_of(derived, "k", layer, kernel_block)
        return other[at : at + block_bytes]

    shared.bounce_buffers.copy_out({"0.full": BlockList(ids=[3, 7])})
    for block in range(BLOCKS):
        for layer in range(LAYERS):
            expected = views[layer][block].view(torch.uint8).numpy().tobytes()
            is_listed = block // per_id in (3, 7)
            assert content(layer, block) == (expected if is_listed else bytes(block_bytes))

    before = [view.clone() for view in views]
    at = offset_of(derived, "k", 1, 5 * per_id)
    other[at : at + block_bytes] = b"\x21" * block_bytes
    shared.bounce_buffers.copy_in({"0.full": BlockList(ids=[5], first_token=4)})
    first = 5 * per_id
    assert (views[1][first].view(torch.uint8) == 0x21).all()
    rest = [block for block in range(BLOCKS) if block // per_id != 5]
    assert all(torch.equal(view[rest], old[rest]) for view, old in zip(views, before, strict=True))


@pytest.mark.parametrize("adopt", [True, False])
def test_host_memory_is_the_same_after_sleep(adopt: bool, opened: list[SharedCaches]) -> None:
    """What was adopted cannot be adopted again, and a mirror's copies must go where the daemon looks."""
    _, derived = derived_of(BIG)
    opened.append(share_memory(derived, adopt=adopt))
    assert opened[0].export_again() == opened[0].regions


class TestDevices:
    """Over the fake driver: what is chosen, not what CUDA does."""

    @pytest.fixture
    def driver(self, monkeypatch: pytest.MonkeyPatch) -> Driver:
        monkeypatch.setenv("KVXFERD_DRIVER", FAKE)
        return open_driver()

    def storage(self, address: int, size_bytes: int) -> TensorRegion:
        _, derived = derived_of(SMALL)
        return TensorRegion(RegionId("kv.0"), address, size_bytes, "cuda", derived.storages[0].owners)

    def test_memory_that_was_made_to_be_shared_is_exported(self, driver: Driver) -> None:
        uuid = driver.devices()[0].uuid
        size = driver.granularity(uuid)
        with Segment(driver, uuid, [size, size]) as segment:
            region, how = device_region(self.storage(segment.address, 2 * size), MemoryPlacement.EXPORTED)
            assert isinstance(region.memory, DeviceMemory)
            assert len(region.memory.allocations) == 2
            assert how == "is exported to the daemon's mover"
            shared = SharedCaches((region,), (how,), storages=(self.storage(segment.address, 2 * size),))
            assert not shared.is_resident
            (renewed,) = shared.export_again()
            assert renewed.memory is not region.memory

    def test_other_memory_is_reached_by_a_thread_of_this_process(self, driver: Driver) -> None:
        uuid = driver.devices()[1].uuid
        address = driver.allocate_plain(uuid, 1 << 20)
        storage = self.storage(address, 1 << 20)
        try:
            with pytest.raises(DeviceError, match="cannot export memory") as caught:
                device_region(storage, MemoryPlacement.EXPORTED)
            assert caught.value.code is Code.REGION_NOT_EXPORTABLE
            region, how = device_region(storage, MemoryPlacement.RESIDENT)
            assert region.memory == ResidentMemory(address, 1 << 20, uuid)
            assert how == "is read by a thread of this worker"
            shared = SharedCaches((region,), (how,), storages=(storage,))
            assert shared.is_resident
            assert shared.export_again() == (region,), "it wakes in the placement in which it slept"
        finally:
            free_plain(driver, address)

    def test_host_memory_of_a_resident_rank_is_neither_adopted_nor_copied(self) -> None:
        _, derived = derived_of(BIG)
        shared = share_memory(derived, MemoryPlacement.RESIDENT)
        (region,), (storage,) = shared.regions, derived.storages
        assert region.memory == ResidentMemory(storage.address, storage.size_bytes)
        assert shared.bounce_buffers is None

    def test_without_a_driver_the_reason_is_the_drivers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVXFERD_DRIVER", "none")
        for placement in placements_for("auto"):
            with pytest.raises(DeviceError) as caught:
                device_region(self.storage(1 << 20, 4096), placement)
            assert caught.value.code is Code.DEVICE_UNAVAILABLE
