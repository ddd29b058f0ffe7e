"""Two hosts, a daemon on each, a prefill engine here and a decode engine there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.proofs.hosts.pair import Pair
from tests.support.network_namespaces import Cable, plugged_in
from tests.support.nodes.fleet import Fleet


@pytest.fixture
def cable() -> Iterator[Cable]:
    with plugged_in() as cable:
        yield cable


@pytest.fixture
def pair(cable: Cable, fleet: Fleet) -> Pair:
    return Pair(fleet, cable)
