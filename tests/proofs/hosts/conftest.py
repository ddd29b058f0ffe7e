"""Two hosts, a daemon on each, a prefill engine here and a decode engine there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.proofs.hosts.pair import Pair
from tests.support.network_namespaces import Cable, NoNamespaces
from tests.support.nodes.fleet import Fleet


@pytest.fixture
def cable() -> Iterator[Cable]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need iproute2")
    try:
        cable = Cable()
    except NoNamespaces as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        yield cable
    finally:
        cable.cut()


@pytest.fixture
def pair(cable: Cable, fleet: Fleet) -> Pair:
    return Pair(fleet, cable)
