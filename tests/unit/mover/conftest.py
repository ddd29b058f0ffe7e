"""Every test must leave the machine as it found it: no process, no descriptor, no shared memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import mover_harness


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    with mover_harness.leaving_nothing():
        yield
