"""The daemons that tests share: what a test leaves in one is found, and the next test has another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.nodes.fleet import Fleet, Machines
from tests.support.nodes.requests import publish, pull_and_check, spec_of
from tests.support.raw_worker import RawWorker


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    monkeypatch.delenv("KVXFERD_TEST_OWN", raising=False)
    return Machines(tmp_path / "m", rest_s=1.0)


def test_what_is_at_rest_is_lent_again_and_what_is_not_ends(machines: Machines, tmp_path: Path) -> None:
    fleets = [Fleet(tmp_path / str(number), machines) for number in range(4)]
    try:
        first = fleets[0].shared("node")
        (source,) = fleets[0].engine(first, spec_of("prefill"))
        (sink,) = fleets[0].engine(first, spec_of("decode"))
        pull_and_check([sink], publish([source], 1), 1)
        source.kill()
        fleets[0].stop()

        assert fleets[1].shared("node") is first
        assert fleets[1].shared("another") is not first
        again = fleets[1].rank()
        assert again.pid == sink.pid
        assert fleets[1].rank().pid not in (source.pid, sink.pid)
        left = RawWorker(first.worker_socket)
        with pytest.raises(AssertionError, match="1 sessions, before 0"):
            fleets[1].stop()
        left.close()
        assert first.exit_code is not None

        assert fleets[2].shared("node") is not first
        killed = fleets[2].shared("node")
        killed.kill()
        with pytest.raises(AssertionError, match="it died"):
            fleets[2].stop()
        assert fleets[3].shared("node") is not killed
        fleets[3].stop()
    finally:
        machines.stop()
