"""A part of the suite in every test run, and the proof that what it looks for it would find."""

from __future__ import annotations

import pytest

from tests.proofs.hostile.attacker import Scene
from tests.proofs.hostile.registry import Attack, attacks
from tests.proofs.hostile.runner import Runner, row_of
from tests.support.other_user import needs_root

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), needs_root]


def test_a_part_of_the_attacks_is_survived():
    quick = [attack for attack in attacks().values() if attack.quick]
    runner = Runner(seed=1)
    try:
        outcomes = runner.run(quick)
    finally:
        runner.close()
    assert len(outcomes) > 10
    assert not [row_of(outcome) for outcome in outcomes if not outcome.survived]
    assert not runner.left_behind


def _kill(scene: Scene) -> str:
    scene.ask("kill", node="a")
    return ""


def test_a_daemon_that_dies_is_noticed():
    runner = Runner(seed=1)
    try:
        (outcome,) = runner.run([Attack("kill", "", "operator", _kill)])
    finally:
        runner.close()
    assert not outcome.survived
    assert any("has ended" in problem for problem in outcome.problems)
