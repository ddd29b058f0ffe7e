"""The run directory: nobody else can hold its locks, and two generations of daemons never meet."""

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
from tests.support.other_user import NOBODY, needs_root, open_directory, run_as, script


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
def test_the_locks_are_in_a_room_of_their_own(directory: Path):
    made = start(directory)
    try:
        assert (directory / "private").stat().st_mode & 0o777 == 0o700
        for name in ("private/daemon.lock", "private/movers.lock"):
            done = subprocess.run(
                [*script("os.open(sys.argv[1], os.O_RDONLY)"), str(directory / name)],
                capture_output=True,
                text=True,
                check=False,
                stdin=subprocess.DEVNULL,
            )
            assert "PermissionError" in done.stderr
    finally:
        made.close()


def test_a_second_daemon_is_told_who_holds_it(directory: Path):
    made = start(directory)
    with pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
        RunDirectory(directory)
    made.close()
    start(directory).close()


@needs_root
def test_a_run_directory_that_is_anothers_is_refused(directory: Path):
    directory.mkdir()
    os.chown(directory, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=f"belongs to uid {NOBODY}"):
        RunDirectory(directory)


@needs_root
def test_a_link_of_anothers_is_refused(directory: Path):
    (directory.parent / "real").mkdir()
    directory.symlink_to(directory.parent / "real")
    os.chown(directory, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(ConfigError, match=f"symbolic link of uid {NOBODY}"):
        RunDirectory(directory)


@needs_root
def test_a_room_that_another_user_has_made_before_is_refused(directory: Path):
    (directory / "private").mkdir(parents=True)
    os.chown(directory / "private", NOBODY, NOBODY)
    with pytest.raises(ConfigError, match="private"):
        RunDirectory(directory)


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_directory_that_others_may_write_in_is_closed(directory: Path, mode: int):
    directory.mkdir()
    directory.chmod(mode)
    start(directory).close()
    assert directory.stat().st_mode & 0o777 == 0o755


@pytest.mark.process
@needs_root
@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_directory_that_it_cannot_close_is_refused(directory: Path, mode: int):
    directory.mkdir()
    directory.chmod(mode)
    body = """
try:
    RunDirectory(Path(sys.argv[1]))
except ConfigError as error:
    print(error.message)
"""
    imports = "\n".join(
        [
            "from pathlib import Path",
            "from kvxferd.errors import ConfigError",
            "from kvxferd.run_directory import RunDirectory",
        ]
    )
    command = [*script(body, imports=imports), str(directory)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "chmod go-w" in said


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
@needs_root
def test_a_user_who_may_not_write_there_is_told_how_to_make_it(directory: Path):
    directory.parent.chmod(0o711)
    body = """
try:
    RunDirectory(Path(sys.argv[1]))
except ConfigError as error:
    print(error.message)
"""
    imports = """
from pathlib import Path
from kvxferd.errors import ConfigError
from kvxferd.run_directory import RunDirectory
"""
    said = run_as(body, str(directory), imports=imports)
    assert f"install -d -o {NOBODY} {directory}`" in said


@pytest.mark.process
def test_movers_inherit_their_lock(directory: Path):
    made = start(directory)
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        pass_fds=made.mover_lock_fds,
    )
    made.close()
    with pytest.raises(ConfigError, match="movers of an earlier daemon"):
        start(directory)
    child.communicate(b"")
    start(directory).close()
