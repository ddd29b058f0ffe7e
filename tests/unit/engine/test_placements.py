"""Which placement of a rank's memory is taken, and what is said where none works."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvxferd.engine import registration
from kvxferd.errors import Code, DeviceError, EngineError, KvxferdError, MoverError
from kvxferd.integrations.vllm.memory.placement_advice import PlacementFailure, failure_of
from kvxferd.layout import EngineSpec
from tests.support.connector_harness import LAYOUT

SPEC = EngineSpec("decode-0", "g", 1, tp_size=2, tp_rank=1)
INSTALL_13 = f"run: {sys.executable} -m pip install 'kvxferd[engine-gpu-cu13]'"
DOCTOR = "run where the daemon runs: kvxferd doctor --gpu"
Register = Callable[..., Any]


def no_bindings() -> DeviceError:
    error = DeviceError(
        "cannot use a GPU without cuda-python (x): pip install 'kvxferd[cuda]'", Code.DEVICE_UNAVAILABLE
    )
    error.__cause__ = ImportError("No module named 'cuda'")
    return error


def not_shared(cause: KvxferdError) -> EngineError:
    """As `share_regions` raises it."""
    error = EngineError("cannot share tensor 'kv.0': exported: x", Code.REGION_NOT_EXPORTABLE)
    error.__cause__ = cause
    return error


NO_NIXL = MoverError("cannot import a transfer library (nixl: No module named 'nixl')", Code.NIXL_UNAVAILABLE)
PLAIN_MEMORY = DeviceError("cannot export memory at 0x10", Code.REGION_NOT_EXPORTABLE)
REFUSED = EngineError("cannot use a GPU: there is no NVIDIA driver here", Code.DEVICE_UNAVAILABLE)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> dict[str, KvxferdError]:
    """What each mover fails with; one that is not in there works."""
    failing: dict[str, KvxferdError] = {}

    def register_as(placements: list[str], *_: Any) -> str:
        mover = "resident" if placements == ["resident"] else "child"
        if (error := failing.get(mover)) is not None:
            raise error
        return mover

    monkeypatch.setattr(registration, "_register_as", register_as)
    return failing


def register(placements: list[str] | None = None) -> Any:
    return registration.register_regions(
        "/x",
        SPEC,
        LAYOUT,
        [],
        placements=placements,
        explain=lambda error: str(failure_of(error, None, "13.0")),
    )


@pytest.mark.parametrize(
    ("placements", "mover"), [(None, "child"), (["memfd"], "child"), (["resident"], "resident")]
)
def test_a_child_is_tried_first_and_placements_pin_one(
    attempts: dict[str, KvxferdError], placements: list[str] | None, mover: str
) -> None:
    assert register(placements) == mover


@pytest.mark.parametrize("error", [not_shared(PLAIN_MEMORY), REFUSED, not_shared(no_bindings())])
def test_a_placement_that_does_not_work_leaves_the_next(
    attempts: dict[str, KvxferdError], error: KvxferdError, caplog: pytest.LogCaptureFixture
) -> None:
    attempts["child"] = error
    with caplog.at_level(logging.INFO, "kvxferd.engine"):
        assert register() == "resident"
    assert "placement of rank (0, 1) of decode-0: resident. " in caplog.text
    assert "; child does not work: " in caplog.text


@pytest.mark.parametrize("code", [Code.RANK_TAKEN, Code.DEADLINE, Code.BUSY])
def test_an_error_that_no_placement_changes_is_raised_as_it_is(
    attempts: dict[str, KvxferdError], code: Code
) -> None:
    attempts["child"] = error = EngineError("cannot register", code)
    with pytest.raises(KvxferdError) as caught:
        register()
    assert caught.value is error


def test_where_none_works_one_message_lists_each_with_its_command(
    attempts: dict[str, KvxferdError],
) -> None:
    attempts |= {"child": REFUSED, "resident": not_shared(NO_NIXL)}
    with pytest.raises(EngineError) as caught:
        register()
    assert caught.value.message.splitlines() == [
        "cannot register rank (0, 1) of decode-0: no placement works",
        f"  child: the daemon refused it: {REFUSED.message} (device-unavailable); {DOCTOR}",
        f"  resident: {NO_NIXL.message}; {INSTALL_13}",
    ]


def test_a_movers_death_outside_rules_a_thread_inside_out(attempts: dict[str, KvxferdError]) -> None:
    attempts["child"] = EngineError("the mover died", Code.MOVER_LOST)
    with pytest.raises(EngineError) as caught:
        register()
    child, resident = caught.value.message.splitlines()[1:]
    assert child.endswith(f"the mover died (mover-lost); read the daemon's log; {DOCTOR}")
    assert resident.startswith("  resident: not tried after that")
    assert resident.endswith('give placements=["resident"] to try it all the same')


POOL = PlacementFailure("torch's pools do not go with expandable segments", "run: unset PYTORCH_ALLOC_CONF")


@pytest.mark.parametrize(
    ("error", "pool", "cuda", "text"),
    [
        (no_bindings(), None, "13.0", "(No module named 'cuda'); " + INSTALL_13),
        (NO_NIXL, None, "12.8", "kvxferd[engine-gpu-cu12]"),
        (NO_NIXL, None, "", "kvxferd[engine-gpu]"),
        (NO_NIXL, None, "14.1", "kvxferd[engine-gpu]"),
        (not_shared(PLAIN_MEMORY), POOL, "", "expandable segments; run: unset PYTORCH_ALLOC_CONF"),
        (not_shared(PLAIN_MEMORY), None, "", DOCTOR),
        (not_shared(EngineError("no block of glibc's", Code.REGION_INVALID)), POOL, "", "exported: x"),
    ],
)
def test_what_mends_it(error: KvxferdError, pool: PlacementFailure | None, cuda: str, text: str) -> None:
    said = str(failure_of(error, pool, cuda))
    assert said.endswith((text, text + "'"))
    assert "kvxferd[cuda]" not in said, "that is the movers' extra"
