"""Every order of events in three small sizes; `make proofs ONLY=model` has more."""

from __future__ import annotations

import pytest

from tests.property.model.scenario import Scenario
from tests.property.model.search import Search
from tests.property.model.sizes import restarted

pytestmark = pytest.mark.slow

SIZES = [
    Scenario(clocks=(1, 1)),
    Scenario(deliveries=True, deaths=1, drops=1),
    restarted(ready=True, sleeps=1, cancel=False),
]


@pytest.mark.parametrize("scenario", SIZES, ids=str)
def test_no_order_of_events_breaks_a_promise(scenario: Scenario) -> None:
    found = Search(scenario).run()
    assert found.complete
    assert found.states > 100
