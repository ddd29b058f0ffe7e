"""The demo as a process: it must pass, it must be able to fail, and it must leave nothing behind."""

import json
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.python_process import run_kvxferd
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
    read_until(process, "request 1 of 100000")
    process.send_signal(number)
    process.communicate(timeout=DEMO_S)
    assert process.returncode == 130
    assert left_behind(place) == []


def test_it_goes_on_until_ctrl_c_and_shows_what_to_look_at(place: Path) -> None:
    process = start(place, "--requests", "1", "--keep")
    page = read_until(process, "look: ").removeprefix("look: ").strip()
    read_until(process, "requests go on until Ctrl-C")
    commands = [read_until(process, "--socket").split() for _ in range(4)]
    with urllib.request.urlopen(page) as reply:
        assert b"kvxferd" in reply.read()
    for _, verb, *arguments in commands[1:]:
        told = run_kvxferd(verb, *arguments)
        assert told.returncode == 0, told.stderr
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEMO_S)
    assert process.returncode == 0
    assert left_behind(place) == []


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Return the first line of its output that contains a text."""
    assert process.stdout is not None
    while text not in (line := process.stdout.readline()):
        assert line, "it ended"
    return line


def test_a_daemon_that_cannot_work_ends_it_with_a_reason(place: Path, tmp_path: Path) -> None:
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text("raise ImportError('no nixl on this machine')\n")
    code, seen = run(place, PYTHONPATH=str(tmp_path))
    assert code == 1
    assert "no nixl on this machine" in seen["error"]
    assert left_behind(place) == []
