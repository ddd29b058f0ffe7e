"""`kvxferd top` against a real server on a real socket."""

import json
import re
from pathlib import Path

import pytest

from kvxferd.cli.top_report import sparkline
from tests.support.node_samples import StillNode
from tests.support.verb_harness import daemon, run

TEXTS = (
    *("-15 min", "Why pulls failed", "cannot pull (req-0)", "Running pulls", "req-3", "Pairs of engines"),
    *("prefill-0", "1.10 ms", "1.75 s ago", "The slowest pulls", "wire 10 ms, queue 1 ms"),
)


async def test_top_shows_what_fails_first(tmp_path: Path) -> None:
    async with daemon(tmp_path, StillNode()) as config:
        shown = await run("top", "--socket", config.control.socket)
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert lines[0].startswith("tcp://10.0.0.1:9441, version ")
    assert lines[1].startswith("Pulls fail: 1 of 3 failed in the last 3 s (33.3 %), most with lease-expired")
    for text in TEXTS:
        assert text in shown.output, text
    assert "\x1b" not in shown.output


async def test_top_as_json(tmp_path: Path) -> None:
    async with daemon(tmp_path, StillNode()) as config:
        shown = await run("top", "--socket", config.control.socket, "--json", "--once")
    found = json.loads(shown.output)
    assert found["samples"]["columns"]["delivered"] == [1, None, 1]
    assert found["status"]["node"]["endpoint"] == "tcp://10.0.0.1:9441"


async def test_an_interval_that_is_no_number(tmp_path: Path) -> None:
    async with daemon(tmp_path, StillNode()) as config:
        for interval in ("nan", "0", "x"):
            assert (
                await run("top", "--socket", config.control.socket, "--interval", interval)
            ).exit_code == 2


@pytest.mark.parametrize(
    ("values", "spans", "is_rate", "want", "top"),
    [
        ([0.0] * 900, [1] * 900, True, "   ", 0.0),
        ([None] * 600 + [3.0] * 300, [None] * 600 + [1] * 300, True, "??#", 3.0),
        ([1.0] * 300, [1] * 300, True, "??#", 1.0),  # the daemon is young
        ([4.0] * 300 + [2.0] * 300 + [0.0] * 300, [2] * 300 + [1] * 600, True, "## ", 2.0),  # late samples
        ([None] * 299 + [5.0] + [1.0] * 300 + [None] * 300, [1] * 900, False, "#. ", 5.0),
    ],
)
def test_sparkline(
    values: list[float | None], spans: list[int | None], is_rate: bool, want: str, top: float
) -> None:
    bars, found = sparkline(values, spans, 3, is_rate=is_rate)
    assert found == top
    assert [char if char in "? " else "#" if char in "█@" else "." for char in bars] == list(want)
    assert not re.search(r"[\x00-\x1f]", bars)
