"""What is explored, by depth. Depth 1 takes a minute or two, 2 an hour."""

from __future__ import annotations

from functools import partial

from tests.property.model.scenario import Scenario

# Sizes in which daemons die and memory sleeps.
restarted = partial(Scenario, scheduler=True, blocks=1, deliveries=True, cold=True)

# Two transfers in the same blocks, or two reading ranks, multiply the sink's states; without
# cancels and unpublishes they stay few enough for depth 1.
SIZES: dict[int, list[Scenario]] = {
    1: [
        Scenario(clocks=(1, 1)),
        Scenario(clocks=(1, 0), drops=1),
        Scenario(cold=True, drops=2, duplicates=1),
        Scenario(deaths=1, drops=1),
        Scenario(deaths=1, clocks=(1, 0), cancel=False),
        Scenario(close=True, doubt=True, drops=1),
        Scenario(close=True, doubt=True, clocks=(1, 0)),
        Scenario(deliveries=True, clocks=(0, 1)),
        Scenario(deliveries=True, deaths=1, drops=1),
        Scenario(deliveries=True, close=True, doubt=True, drops=1),
        Scenario(deliveries=True, transfers=2, cancel=False),
        Scenario(transfers=2, cancel=False),
        Scenario(transfers=2, cancel=False, unpublish=False, drops=1),
        Scenario(transfers=2, cancel=False, unpublish=False, clocks=(1, 0)),
        Scenario(readers=2, cancel=False),
        Scenario(readers=2, cancel=False, unpublish=False, drops=1),
        Scenario(readers=2, cancel=False, unpublish=False, clocks=(1, 0)),
        restarted(crashes=(0, 1)),
        restarted(lag=True, sleeps=1, cancel=False),
        restarted(ready=True, sleeps=1, cancel=False),
        restarted(sleeps=1, crashes=(1, 0), cancel=False, unpublish=False),
    ],
    2: [
        restarted(lag=True, crashes=(1, 0), cancel=False),
        restarted(again=True, lag=True, crashes=(1, 0), cancel=False, unpublish=False),
        restarted(transfers=2, sleeps=1, cancel=False, unpublish=False),
        restarted(ready=True, sleeps=1, crashes=(1, 0), cancel=False, unpublish=False),
        restarted(spans=True, sleeps=1, crashes=(1, 0), cancel=False, unpublish=False),
        Scenario(close=True, doubt=True, drops=1, duplicates=1),
        Scenario(clocks=(1, 1), drops=1, duplicates=1),
        Scenario(clocks=(2, 1)),
        Scenario(cold=True, clocks=(1, 1)),
        Scenario(deaths=1, drops=1, duplicates=1),
        Scenario(deaths=1, clocks=(1, 0)),
        Scenario(deliveries=True, deaths=1, clocks=(0, 1), cancel=False),
        Scenario(deliveries=True, close=True, deaths=1, clocks=(0, 1), cancel=False, unpublish=False),
        Scenario(deaths=1, clocks=(0, 1), cancel=False),
        Scenario(close=True, doubt=True, clocks=(0, 1)),
        Scenario(transfers=2, cancel=False, clocks=(1, 0)),
        Scenario(transfers=2, cancel=False, drops=1, duplicates=1),
        Scenario(readers=2, clocks=(1, 0)),
        Scenario(readers=2, cancel=False, drops=1, duplicates=1),
    ],
}


def upto(depth: int) -> list[Scenario]:
    """Every size up to a depth."""
    return [scenario for at, found in SIZES.items() if at <= depth for scenario in found]
