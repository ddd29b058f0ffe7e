"""The end-to-end tests' fleet. Without a GPU the tests run over the fake driver; the other half skips."""

from __future__ import annotations

import pytest

from tests.support.devices import DRIVERS, driver_or_skip


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    driver_or_skip(request.param)
    return request.param
