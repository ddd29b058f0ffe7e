"""How doctor ends, and its short table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvxferd.cli.doctor import CHECKS, doctor
from kvxferd.doctor.report import (
    EXIT_FAILED,
    EXIT_NO_GPU,
    EXIT_OK,
    PlacementResult,
    exit_status,
    fail,
    ok,
    print_findings,
    print_placements,
    warn,
)

COPY = PlacementResult(placement="device copy", gigabytes_per_s=1000.0)
DIRECT = PlacementResult(placement="direct", gigabytes_per_s=250.0, lanes="cuda_ipc/cuda")
STAGED = PlacementResult(placement="staged", refusal="cannot register: out of memory [device-error]")


@pytest.mark.parametrize(
    ("findings", "tried", "wanted"),
    [
        ([ok("a", "x"), warn("b", "y", "do z")], None, EXIT_OK),
        ([fail("gpu", "none", "buy one")], None, EXIT_OK),  # what is not needed
        ([fail("nixl", "none", "install it", essential=True)], None, EXIT_FAILED),
        ([ok("a", "x")], (), EXIT_NO_GPU),
        ([ok("a", "x")], (COPY, DIRECT), EXIT_OK),
        ([ok("a", "x")], (COPY, DIRECT, STAGED), EXIT_FAILED),
        ([fail("nixl", "none", "install it", essential=True)], (), EXIT_FAILED),
    ],
)
def test_the_status_says_whether_anything_needed_lacks(findings, tried, wanted):
    assert exit_status(findings, tried) == wanted


def test_the_table_of_placements(capsys: pytest.CaptureFixture[str]):
    print_placements((COPY, DIRECT, STAGED))
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [re.split("  +", row) for row in rows] == [
        ["device copy", "yes", "1e+03", "100.0%"],
        ["direct", "yes, over cuda_ipc/cuda", "250", "25.0%"],
        ["staged", "cannot register: out of memory [device-error]"],
    ]


def test_findings_are_not_markup(capsys: pytest.CaptureFixture[str]):
    print_findings([warn("a", "[bold]x[/bold]\x1b[31m", "do z")])
    out = capsys.readouterr().out
    assert "[bold]x[/bold]" in out
    assert "\x1b[31m" not in out


def test_the_help_and_the_manual_name_every_check():
    help_text = CliRunner().invoke(doctor, ["--help"]).output
    manual = Path(__file__).parents[3].joinpath("docs/how-to/when-something-is-wrong.md").read_text()
    rows = manual.partition("| check | looks at |")[2].partition("\n\n")[0]
    named = [name for row in re.findall(r"^\| (`.*?) \|", rows, re.M) for name in re.findall("`(\\w+)`", row)]
    assert named == list(CHECKS)
    for name in CHECKS:
        assert name in help_text
