"""The pair of movers that all tests of this package share, and no other package."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.mover_pair import Movers, real_movers


@pytest.fixture(scope="package")
def movers() -> Iterator[Movers]:
    with real_movers() as made:
        yield made
