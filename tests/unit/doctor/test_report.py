"""How doctor ends, and its short table."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from kvxferd.cli.doctor import CHECKS, doctor
from kvxferd.doctor.daemon import answering
from kvxferd.doctor.report import (
    EXIT_FAILED,
    EXIT_NO_GPU,
    EXIT_OK,
    CheckContext,
    Finding,
    exit_status,
    fail,
    ok,
    print_findings,
    warn,
)
from tests.support.node_samples import PEER

DIRECT = msgspec.structs.replace(ok("direct", "250 GB/s"), name="placements")
STAGED = msgspec.structs.replace(fail("staged", "x", "y", essential=True), name="placements")


@pytest.mark.parametrize(
    ("findings", "needs_gpu", "wanted"),
    [
        ([ok("a", "x"), warn("b", "y", "do z")], False, EXIT_OK),
        ([fail("gpu", "none", "buy one")], False, EXIT_OK),  # what is not needed
        ([fail("nixl", "none", "install it", essential=True)], False, EXIT_FAILED),
        ([ok("a", "x")], True, EXIT_NO_GPU),
        ([ok("a", "x"), DIRECT], True, EXIT_OK),
        ([ok("a", "x"), DIRECT, STAGED], True, EXIT_FAILED),
        ([fail("nixl", "none", "install it", essential=True)], True, EXIT_FAILED),
    ],
)
def test_the_status_says_whether_anything_needed_lacks(findings, needs_gpu, wanted):
    assert exit_status(findings, needs_gpu) == wanted


def test_a_finding_is_a_line_with_its_check_and_part_and_what_to_do_below_and_no_markup(capsys):
    print_findings([DIRECT, STAGED, ok("tcp", "[bold]fine[/bold]\x1b[31m")])
    assert capsys.readouterr().out.splitlines() == [
        "This node",
        "ok    placements: direct  250 GB/s",
        "no    placements: staged  x",
        "      to do: y",
        "ok    tcp                 [bold]fine[/bold]\N{REPLACEMENT CHARACTER}[31m",
    ]


def test_the_help_and_the_manual_name_every_check():
    help_text = CliRunner().invoke(doctor, ["--help"]).output
    manual = Path(__file__).parents[3].joinpath("docs/how-to/when-something-is-wrong.md").read_text()
    rows = manual.partition("| check | looks at |")[2].partition("\n\n")[0]
    named = [name for row in re.findall(r"^\| (`.*?) \|", rows, re.M) for name in re.findall("`(\\w+)`", row)]
    assert named == list(CHECKS)
    for name in CHECKS:
        assert name in help_text


class Daemon:
    """Replies to `/v1/status`."""

    def __init__(self, verdict: dict[str, str]) -> None:
        lists: dict[str, object] = {"reasons": [], "warnings": []}
        node = {"endpoint": PEER}
        self.answer = lists | {"version": "0", "ready": True, "node": node, "verdict": verdict}

    def get(self, path: str) -> dict[str, object]:
        assert path == "/v1/status"
        return self.answer


@pytest.mark.parametrize(
    ("level", "remedy", "found"),
    [
        ("bad", "look at it", warn("state", "Pulls fail", "look at it")),
        ("warn", "", warn("state", "Pulls fail", "`kvxferd status` has the rest")),
        ("good", "", ok("state", "Pulls fail")),
    ],
)
def test_doctor_has_the_daemon_s_verdict(level: str, remedy: str, found: Finding) -> None:
    daemon = Daemon({"level": level, "text": "Pulls fail", "remedy": remedy})
    assert found in list(answering(CheckContext(None, daemon, {})))  # type: ignore[arg-type]
