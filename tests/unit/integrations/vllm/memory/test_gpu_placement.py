"""Which placement of GPU memory is taken, and what is said where none works."""

from __future__ import annotations

import sys

import pytest

from kvxferd.engine.placement_search import PlacementSearch
from kvxferd.errors import Code, DeviceError, EngineError, KvxferdError, MoverError
from kvxferd.integrations.vllm.memory.gpu_placement import (
    PlacementFailure,
    gpu_placement_search,
    placements_for,
)
from kvxferd.memory import MemoryPlacement

RANK = "rank (0, 1) of decode-0"
EXPORTED, RESIDENT = MemoryPlacement.EXPORTED, MemoryPlacement.RESIDENT
INSTALL_13 = f"run: {sys.executable} -m pip install 'kvxferd[engine-gpu-cu13]'"


def no_bindings() -> DeviceError:
    error = DeviceError(
        "cannot use a GPU without cuda-python (x): pip install 'kvxferd[cuda]'", Code.DEVICE_UNAVAILABLE
    )
    error.__cause__ = ImportError("No module named 'cuda'")
    return error


NO_NIXL = MoverError("cannot import a transfer library (nixl: No module named 'nixl')", Code.NIXL_UNAVAILABLE)
PLAIN_MEMORY = DeviceError("cannot export memory at 0x10", Code.REGION_NOT_EXPORTABLE)
REFUSED = EngineError("cannot use a GPU: there is no NVIDIA driver here", Code.DEVICE_UNAVAILABLE)
FULL = EngineError("cannot cuDevicePrimaryCtxRetain: out of memory", Code.DEVICE_ERROR)


def search(setting: str = "auto", cuda: str = "13.0", **more: PlacementFailure) -> PlacementSearch:
    return gpu_placement_search(RANK, setting, more.get("pool_failure"), cuda)


@pytest.mark.parametrize(
    ("setting", "placements"),
    [("auto", (EXPORTED, RESIDENT)), ("exported", (EXPORTED,)), ("resident", (RESIDENT,))],
)
def test_exported_is_tried_first_and_a_setting_pins_one(
    setting: str, placements: tuple[MemoryPlacement, ...]
) -> None:
    assert placements_for(setting) == placements
    assert search(setting).current is placements[0]


@pytest.mark.parametrize("error", [PLAIN_MEMORY, REFUSED, FULL, no_bindings()])
def test_a_placement_that_does_not_work_leaves_the_next(error: KvxferdError) -> None:
    tried = search()
    assert "exported. Its mover is a process of the daemon" in tried.report()
    tried.fail(error)
    assert tried.current is RESIDENT
    assert "; exported does not work: " in tried.report()


@pytest.mark.parametrize(
    "error",
    [
        EngineError("cannot register: rank (0, 1) is taken", Code.RANK_TAKEN),
        KvxferdError("no reply", Code.DEADLINE),
        EngineError("too many", Code.BUSY, retry_after_s=1.0),
    ],
)
def test_an_error_that_no_placement_changes_is_raised_as_it_is(error: KvxferdError) -> None:
    tried = search()
    with pytest.raises(KvxferdError) as caught:
        tried.fail(error)
    assert caught.value is error
    assert tried.current is EXPORTED


def test_where_none_works_one_message_lists_each_with_its_command() -> None:
    tried = search()
    tried.fail(REFUSED)
    with pytest.raises(EngineError) as caught:
        tried.fail(NO_NIXL)
    assert caught.value.code is Code.NIXL_UNAVAILABLE
    assert caught.value.message.splitlines() == [
        "cannot register rank (0, 1) of decode-0: no placement of its GPU memory works",
        "  exported: the daemon refused it: cannot use a GPU: there is no NVIDIA driver here "
        "(device-unavailable); run where the daemon runs: kvxferd doctor --gpu",
        f"  resident: cannot import a transfer library (nixl: No module named 'nixl'); {INSTALL_13}",
    ]


def test_bindings_that_are_missing_are_named_once_for_each_placement() -> None:
    tried = search()
    tried.fail(no_bindings())
    with pytest.raises(EngineError) as caught:
        tried.fail(no_bindings())
    _, exported, resident = caught.value.message.splitlines()
    for line in (exported, resident):
        assert "cuda-python is not installed in this environment (No module named 'cuda')" in line
        assert line.endswith(INSTALL_13)
        assert "kvxferd[cuda]" not in line, "that is the movers' extra"


@pytest.mark.parametrize(
    ("cuda", "extra"),
    [("13.0", "engine-gpu-cu13"), ("12.8", "engine-gpu-cu12"), ("", "engine-gpu"), ("14.1", "engine-gpu")],
)
def test_the_extra_is_of_torchs_cuda(cuda: str, extra: str) -> None:
    with pytest.raises(EngineError, match=rf"kvxferd\[{extra}\]"):
        search("resident", cuda).fail(NO_NIXL)


def test_memory_outside_the_pool_names_why_there_was_none() -> None:
    failure = PlacementFailure(
        "torch's pools do not go with expandable segments", "run: unset PYTORCH_ALLOC_CONF"
    )
    with pytest.raises(EngineError) as caught:
        search("exported", pool_failure=failure).fail(PLAIN_MEMORY)
    assert "expandable segments; run: unset PYTORCH_ALLOC_CONF" in caught.value.message


def test_what_killed_a_mover_outside_is_not_tried_inside() -> None:
    with pytest.raises(EngineError) as caught:
        search().fail(EngineError("the mover died", Code.MOVER_LOST))
    _, exported, resident = caught.value.message.splitlines()
    assert exported.startswith("  exported: the daemon refused it: the mover died (mover-lost)")
    assert resident.startswith("  resident: not tried")
    assert '"gpu_placement": "resident"' in resident
