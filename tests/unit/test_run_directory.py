"""The run directory: nobody else can hold its locks, and a daemon waits for its predecessor's movers."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxferd.errors import ConfigError
from kvxferd.run_directory import RunDirectory
from tests.support.other_user import NOBODY, needs_root, open_directory, run_as_nobody

IMPORTS = """
from pathlib import Path
from kvxferd.errors import ConfigError
from kvxferd.run_directory import RunDirectory
"""
START = """
try:
    RunDirectory(Path(sys.argv[1]))
except ConfigError as error:
    print(error.message)
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    with open_directory() as path:
        yield path / "run"


def start(directory: Path, wait_s: float = 0.2) -> RunDirectory:
    made = RunDirectory(directory)
    try:
        asyncio.run(made.wait_for_movers(wait_s))
    except BaseException:
        made.close()
        raise
    return made


@pytest.mark.process
@needs_root
def test_no_other_user_can_open_the_locks(directory: Path):
    made = start(directory)
    try:
        assert (directory / "private").stat().st_mode & 0o777 == 0o700
        for name in ("daemon.lock", "movers.lock"):
            with pytest.raises(subprocess.CalledProcessError) as refused:
                run_as_nobody("os.open(sys.argv[1], os.O_RDONLY)", str(directory / "private" / name))
            assert "PermissionError" in refused.value.stderr
    finally:
        made.close()


def test_a_second_daemon_is_told_who_holds_it(directory: Path):
    made = start(directory)
    with pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
        RunDirectory(directory)
    made.close()
    start(directory).close()


@needs_root
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("the directory", f"belongs to uid {NOBODY}"),
        ("a link to it", f"symbolic link of uid {NOBODY}"),
        ("its room", "private"),
    ],
)
def test_what_belongs_to_another_user_is_refused(directory: Path, what: str, words: str):
    theirs = directory
    if what == "a link to it":
        (directory.parent / "real").mkdir()
        directory.symlink_to(directory.parent / "real")
    else:
        theirs = directory / "private" if what == "its room" else directory
        theirs.mkdir(parents=True)
    os.chown(theirs, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(ConfigError, match=words):
        RunDirectory(directory)


@pytest.mark.process
@needs_root
@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_directory_that_others_may_write_in_is_closed_or_refused(directory: Path, mode: int):
    directory.mkdir()
    directory.chmod(mode)
    assert "chmod go-w" in run_as_nobody(START, str(directory), imports=IMPORTS), "this user cannot close it"
    start(directory).close()
    assert directory.stat().st_mode & 0o777 == 0o755


@pytest.mark.process
@needs_root
def test_a_user_who_may_not_write_there_is_told_how_to_make_it(directory: Path):
    directory.parent.chmod(0o711)
    assert f"install -d -o {NOBODY} {directory}`" in run_as_nobody(START, str(directory), imports=IMPORTS)


def test_the_worker_socket_has_a_directory_of_its_own_whatever_the_umask(directory: Path):
    before = os.umask(0o077)
    try:
        made = RunDirectory(directory, str(directory / "worker" / "worker.sock"))
    finally:
        os.umask(before)
    assert (directory / "worker").stat().st_mode & 0o777 == 0o755
    made.close()


def test_a_path_that_cannot_be_used_is_refused_with_what_to_do(directory: Path):
    directory.write_text("")
    for path in (directory, directory / "below"):
        with pytest.raises(ConfigError, match="remove that, or name another"):
            start(path)


def test_a_full_directory_is_refused_with_what_to_do(directory: Path, monkeypatch: pytest.MonkeyPatch):
    """Empty files have room where their first byte has none."""

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(ConfigError, match="No space left on device; make room there"):
            start(directory)
    start(directory).close()  # nothing is held


@pytest.mark.process
def test_a_start_waits_for_a_process_that_has_inherited_the_movers_lock(directory: Path):
    made = start(directory)
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        pass_fds=[made.movers_lock_fd],
    )
    made.close()
    with pytest.raises(ConfigError, match="movers of an earlier daemon"):
        start(directory)
    child.communicate(b"")
    start(directory).close()
