"""The pair of movers that all tests of this package share, and no other package."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvxferd.wire.mover import ReadWay
from tests.property.random_pairs.checked_pulls import Movers


@pytest.fixture(scope="package", params=[ReadWay.DIRECT, ReadWay.COVERING])
def movers(request: pytest.FixtureRequest) -> Iterator[Movers]:
    """One pair for each way to read, which both keep every promise."""
    movers = Movers(request.param)
    try:
        yield movers
    finally:
        movers.stop()
