"""The demo as a process: it must pass, it must be able to fail, and it must leave nothing behind."""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.tool_process import left_behind, start_tool, tool_directory

pytestmark = pytest.mark.slow

SMALL = (
    *("--prefill-tp", "2", "--prefill-pp", "1", "--prefill-block-tokens", "8"),
    *("--decode-tp", "1", "--decode-block-tokens", "16"),
    *("--layers", "2", "--heads", "2", "--head-dim", "16", "--requests", "3", "--tokens", "70"),
)
DEMO_S = 100


@pytest.fixture
def place() -> Iterator[Path]:
    """The demo's temporary directory."""
    with tool_directory() as path:
        yield path


def start(place: Path, *flags: str, **environ: str) -> subprocess.Popen[str]:
    """Start a small demo."""
    return start_tool(place, "demo", *SMALL, *flags, **environ)


def run(place: Path, *flags: str, **environ: str) -> tuple[int, dict[str, Any]]:
    """Run a small demo; return its exit code and the object that it printed."""
    process = start(place, "--json", *flags, **environ)
    out, err = process.communicate(timeout=DEMO_S)
    try:
        return process.returncode, json.loads(out)
    except ValueError:
        pytest.fail(f"not one JSON object: {out!r}\n{err}")


@pytest.mark.parametrize(("damage", "field"), [("item", "wrong_items"), ("spill", "spilled_bytes")])
def test_one_spoilt_byte_fails_it(place: Path, damage: str, field: str) -> None:
    code, seen = run(place, "--requests", "1", "--damage", damage)
    assert code == 1
    assert seen[field] == 1
    assert seen["delivered"] == 1
    assert seen["ok"] is False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_behind(place: Path, number: signal.Signals) -> None:
    process = start(place, "--requests", "100000")
    assert process.stderr is not None
    while "moving" not in process.stderr.readline():  # ends with the process, if it never gets there
        assert process.poll() is None
    process.send_signal(number)
    process.communicate(timeout=DEMO_S)
    assert process.returncode == 130
    assert left_behind(place) == []


def test_a_daemon_that_cannot_work_ends_it_with_a_reason(place: Path, tmp_path: Path) -> None:
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text("raise ImportError('no nixl on this machine')\n")
    code, seen = run(place, PYTHONPATH=str(tmp_path))
    assert code == 1
    assert "no nixl on this machine" in seen["error"]
    assert left_behind(place) == []
