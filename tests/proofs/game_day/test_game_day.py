"""The short form of `make proofs ONLY=game-day`: one fault, and every output of the node names its cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proofs.game_day.__main__ import run, table
from tests.proofs.game_day.faults import FAULTS

pytestmark = pytest.mark.timeout(180)


def test_an_operator_finds_a_source_that_releases_early_in_every_output(tmp_path: Path) -> None:
    (fault,) = [fault for fault in FAULTS if fault.name == "early-release"]
    result = run(fault, tmp_path, [fault.node], after_s=1.0)
    assert not result.is_hidden
    assert all(result.named_by.values()), result.named_by
    assert {"status", "history --failed", "doctor", "top --once", "log"} == result.named_by.keys()
    assert "Ready." not in result.outputs["decode"]["top --once"]
    assert "A source that releases early | decode | Pulls fail" in table([result])
