"""The unit, its user and its directories, and the page's commands in a directory that stands for the root."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvxferd.cli.root import root as command_line
from kvxferd.config import Config, load_config
from kvxferd.control.curve_keys import read_key
from kvxferd.daemon import STOP_S
from tests.support.documented_commands import commands_of
from tests.support.repository import ROOT

DEPLOY = ROOT / "deploy"
UNIT = (DEPLOY / "kvxferd.service").read_text()
SYSUSERS = DEPLOY / "systemd" / "kvxferd.sysusers.conf"
TMPFILES = DEPLOY / "systemd" / "kvxferd.tmpfiles.conf"
PAGE = ROOT / "docs" / "how-to" / "install.md"
# Those of the image come behind, and begin with sudo.
COMMANDS = [
    " ".join(command.words) for command in takewhile(lambda c: c.program != "sudo", commands_of(PAGE))
]
# What would change this machine, or load packages from the network.
NOT_RUN = ("/opt/kvxferd/bin/pip", "usermod", "systemctl")


def unit_option(name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)
    return str(value)


def require(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program}")


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.process
def test_systemd_has_nothing_to_say_about_the_unit(tmp_path: Path) -> None:
    require("systemd-analyze")
    # The unit's own program is not installed where this runs.
    unit = tmp_path / "kvxferd.service"
    unit.write_text(UNIT.replace(unit_option("ExecStart").split()[0], sys.executable))
    assert run("systemd-analyze", "verify", str(unit)) == ""


def test_the_unit_reloads_the_file_that_it_starts_with() -> None:
    assert unit_option("ExecReload").split()[1:] == ["reload", *unit_option("ExecStart").split()[2:]]


def test_the_unit_waits_longer_than_a_drain() -> None:
    assert unit_option("Type") == "notify"
    assert float(unit_option("TimeoutStopSec")) > Config().drain.limit_s + STOP_S


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory that stands for the root of a node, and that every user may enter."""
    if os.geteuid() != 0:
        pytest.skip("users and owners are root's to make")
    for program in ("systemd-sysusers", "systemd-tmpfiles", "install", "runuser"):
        require(program)
    with tempfile.TemporaryDirectory(prefix="kvxferd-root-") as name:
        path = Path(name)
        path.chmod(0o755)
        (path / "etc").mkdir()
        yield path


def under(root: Path, words: list[str]) -> list[str]:
    """Return the words with absolute paths below `root`."""
    return [f"{root}{word}" if word.startswith("/") else word for word in words]


def run_below(root: Path, command: str) -> None:
    """Run a command of the page with `root` for /."""
    program, *words = command.split()
    match program:
        case "python3":
            # pip would only be the one that is not run.
            run(sys.executable, *under(root, words[:2]), "--without-pip", *under(root, words[2:]))
        case "install":
            run(program, *under(root, words))
        case "systemd-sysusers" | "systemd-tmpfiles":
            run(program, f"--root={root}", *words)
        case "runuser":
            # The user exists below `root` alone: its number, and the program from here.
            assert words[:4] == ["-u", "kvxferd", "--", "/opt/kvxferd/bin/kvxferd"]
            run_verb(uid_of(root, "kvxferd"), under(root, words[4:]))
        case "/opt/kvxferd/bin/kvxferd":
            run_verb(0, under(root, words))
        case _:
            raise AssertionError(f"no test runs {command}")


def uid_of(root: Path, name: str) -> int:
    lines = (root / "etc/passwd").read_text().splitlines()
    return next(int(line.split(":")[2]) for line in lines if line.startswith(f"{name}:"))


def run_verb(uid: int, words: list[str]) -> None:
    os.seteuid(uid)
    try:
        done = CliRunner().invoke(command_line, words)
    finally:
        os.seteuid(0)
    assert done.exit_code == 0, done.output


@pytest.mark.process
def test_the_page_s_commands_make_what_the_unit_and_the_daemon_need(root: Path) -> None:
    for command in COMMANDS:
        if not command.startswith(NOT_RUN) and not command.endswith("kvxferd status"):
            run_below(root, command)
    uid = uid_of(root, unit_option("User"))
    for path, mode in (("run/kvxferd", 0o755), ("run/kvxferd/worker", 0o755), ("etc/kvxferd/keys", 0o700)):
        status = (root / path).stat()
        assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (uid, mode)
    assert (root / "etc/kvxferd/kvxferd.toml").stat().st_uid == 0
    assert (root / "etc/systemd/system/kvxferd.service").read_text() == UNIT
    assert (root / "opt/kvxferd/bin/python3").exists()
    key = root / "etc/kvxferd/keys/peer.key"
    assert read_key(key).public
    assert key.stat().st_uid == uid
    # What the unit starts is what was installed, and the daemon loads it.
    program, _, _, config = unit_option("ExecStart").split()
    assert program.startswith("/opt/kvxferd/bin/")
    assert load_config(Path(f"{root}{config}"), {}, {}) == Config()
