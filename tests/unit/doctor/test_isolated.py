"""Whatever the process of a check does, doctor goes on, says why, and leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvxferd.doctor.isolated import call_isolated, isolated
from kvxferd.errors import KvxferdError
from tests.support.child_objects import Counter

pytestmark = pytest.mark.process

LIMIT_S = 30.0


def reason(limit_s: float, method: Callable[..., Any], *args: Any) -> str:
    """Return why a call failed; its process and its directory must be gone afterwards."""
    with (
        pytest.raises(KvxferdError) as raised,
        isolated(Counter, os.environ) as child,
    ):
        call_isolated(child, limit_s, method, *args)
    assert not Path(f"/proc/{child.pid}").exists()
    assert not child.log.parent.exists()
    return raised.value.message


def test_a_result_comes_back_and_the_environment_is_the_one_that_was_given() -> None:
    with isolated(Counter, {**os.environ, "KVXFERD_OF_CHILD": "yes"}) as child:
        assert call_isolated(child, LIMIT_S, Counter.add, 3) == 3
        assert call_isolated(child, LIMIT_S, Counter.variable, "KVXFERD_OF_CHILD") == "yes"


@pytest.mark.parametrize(
    ("method", "args", "wanted"),
    [
        (Counter.refuse, (), "cannot count: it counts already; try again"),
        (Counter.divide, (), "ZeroDivisionError: division by zero"),
        (Counter.say_and_die, ("it was too much",), "it was killed by SIGKILL"),
        (Counter.leave, ("the library gave up",), "the library gave up"),
        (Counter.leave, (0,), "it ended with status 0 and said nothing"),
    ],
)
def test_a_failure_is_one_sentence(method: Callable[..., Any], args: tuple[Any, ...], wanted: str) -> None:
    assert reason(LIMIT_S, method, *args) == wanted


def test_a_call_that_hangs_is_ended_in_time() -> None:
    assert reason(0.1, Counter.hang) == "it has not ended within 0.1 s"
