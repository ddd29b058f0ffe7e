"""Faults on two real daemons with traffic, and what an operator sees of each.

Prints after how many seconds each sign was in a verdict, and which outputs name the cause. Which alerts fire:
`make proofs ONLY=monitoring`.
"""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.proofs.game_day.faults import FAULTS, Fault
from tests.support.nodes.waiting import wait_until

LIMIT_S = 45.0
AFTER_S = 6.0  # after the sign, for the failures that follow it
PULLS_BEFORE = 20


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_verdict_has_the_faults_sign_and_an_output_names_its_cause(fault: Fault, tmp_path: Path) -> None:
    with closing(fault.make(tmp_path)) as stage:
        struck, before = stage.began, set[tuple[str, str]]()
        if fault.strike is not None:
            wait_until(lambda: stage.traffic.num_ended >= PULLS_BEFORE, "pulls end", LIMIT_S)
            struck, before = time.time(), set(stage.seen)
            fault.strike(stage)
        sign = (fault.node, fault.sign)
        assert sign not in before
        wait_until(lambda: not fault.sign or sign in stage.seen, f"{sign} is in a verdict", LIMIT_S)
        time.sleep(AFTER_S)
        outputs, texts = stage.outputs(fault.node), fault.names(stage)
        named_by = [name for name, shown in outputs.items() if any(text in shown for text in texts)]
        began = {key: f"{since - struck:.1f} s" for key, since in stage.seen.items() if key not in before}
        print(f"{fault.name}, {fault.node}: {began}; named by {', '.join(named_by)}")
        assert named_by, outputs
