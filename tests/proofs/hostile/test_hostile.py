"""What the suite looks for it finds."""

from __future__ import annotations

import os
import signal

import pytest

from tests.proofs.hostile.attack import Attack, Scene
from tests.proofs.hostile.runner import Runner
from tests.support.nodes.processes import lives
from tests.support.nodes.waiting import wait_until
from tests.support.other_user import needs_root

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), needs_root]


def _kill(scene: Scene) -> str:
    os.kill(scene.a.pid, signal.SIGKILL)
    wait_until(lambda: not lives(scene.a.pid), "it is dead")
    return ""


def test_a_daemon_that_dies_is_noticed():
    runner = Runner(seed=1)
    try:
        (outcome,) = runner.run([Attack("kill", "", "root", _kill)])
    finally:
        runner.close()
    assert not outcome.survived
    # Its sockets close a moment before it has ended.
    assert any("has ended" in text or "does not answer" in text for text in outcome.problems)
