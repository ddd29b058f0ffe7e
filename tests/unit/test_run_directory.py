"""The run directory: nobody else can hold its locks, and two generations of daemons never meet."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvxferd.errors import Code, ConfigError
from kvxferd.run_directory import RunDirectory
from tests.support.other_user import NOBODY, needs_root, open_directory, run_as, script

# Holds a lock, as version 0.1 left it to everybody, until its standard input ends.
HOLDER = """
import fcntl
fd = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(fd, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    with open_directory() as path:
        yield path / "run"


def left_by_0_1(directory: Path) -> None:
    directory.mkdir(mode=0o755)
    for name in ("daemon.lock", "movers.lock"):
        (directory / name).touch(0o644)


@contextmanager
def held(path: Path, uid: int = NOBODY, body: str = HOLDER) -> Iterator[None]:
    command = [*script(body, uid, uid, "import fcntl"), str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        try:
            yield
        finally:
            holder.stdin.close()


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
@pytest.mark.parametrize("name", ["daemon.lock", "movers.lock"])
def test_a_stranger_who_holds_an_old_lock_blocks_no_start_and_none_after_it(directory: Path, name: str):
    left_by_0_1(directory)
    with held(directory / name):
        for _ in range(2):
            start(directory).close()
        assert (directory / name).stat().st_mode & 0o777 == 0o600
        again = os.open(directory / name, os.O_RDONLY)
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the stranger's is another file by now
        os.close(again)


@pytest.mark.process
@needs_root
@pytest.mark.parametrize("name", ["daemon.lock", "movers.lock"])
def test_a_stranger_who_runs_a_set_uid_program_is_a_stranger(directory: Path, name: str):
    left_by_0_1(directory)
    body = HOLDER.replace("print", f"os.setresuid({NOBODY}, 0, 0)\nprint")
    with held(directory / name, 0, body):
        start(directory).close()
        assert (directory / name).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["daemon.lock", "movers.lock"])
def test_who_opened_an_old_lock_before_the_first_start_blocks_none_after_it(directory: Path, name: str):
    left_by_0_1(directory)
    opened = os.open(directory / name, os.O_RDONLY)
    made = start(directory)
    with pytest.raises(BlockingIOError):  # an older daemon that had opened it, and asks for its lock now
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    made.close()
    fcntl.flock(opened, fcntl.LOCK_EX)
    start(directory).close()
    os.close(opened)
    assert not list(directory.glob("*.new"))


@pytest.mark.process
@needs_root
def test_the_new_locks_are_in_a_room_of_their_own(directory: Path):
    made = start(directory)
    try:
        assert (directory / "private").stat().st_mode & 0o777 == 0o700
        for name in ("daemon.lock", "private/daemon.lock", "private/movers.lock"):
            done = subprocess.run(
                [*script(HOLDER, imports="import fcntl"), str(directory / name)],
                capture_output=True,
                text=True,
                check=False,
                stdin=subprocess.DEVNULL,
            )
            assert "PermissionError" in done.stderr
    finally:
        made.close()


@pytest.mark.process
@pytest.mark.parametrize("name", ["daemon.lock", "movers.lock"])
def test_a_process_of_this_user_that_holds_an_old_lock_is_an_earlier_daemons(directory: Path, name: str):
    left_by_0_1(directory)
    with held(directory / name, os.geteuid()), pytest.raises(ConfigError) as raised:
        start(directory)
    assert raised.value.code is Code.ALREADY_RUNNING
    start(directory).close()


@pytest.mark.parametrize("name", ["daemon.lock", "movers.lock"])
def test_an_earlier_daemon_finds_its_locks_taken(directory: Path, name: str):
    made = start(directory)
    other = os.open(directory / name, os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    made.close()
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


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
    assert os.readlink(directory / "worker.sock") == "worker/worker.sock"
    made.close()
    assert not (directory / "worker.sock").is_symlink()


def test_a_dead_daemons_link_or_socket_is_replaced(directory: Path):
    directory.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(directory / "worker.sock"))
    for _ in range(2):
        made = RunDirectory(directory, str(directory / "worker" / "worker.sock"))
        assert (directory / "worker.sock").is_symlink()
        made._old_socket._is_made_here = False  # it is killed
        made.close()


def test_a_dead_link_goes_where_the_socket_has_another_place_now(directory: Path):
    made = RunDirectory(directory, str(directory / "worker" / "worker.sock"))
    made._old_socket._is_made_here = False  # it is killed
    made.close()
    RunDirectory(directory, "/elsewhere/worker.sock").close()
    assert not (directory / "worker.sock").is_symlink()


def test_a_link_that_is_not_ours_or_is_answered_stays(directory: Path):
    directory.mkdir()
    (directory / "worker.sock").symlink_to("/elsewhere")
    RunDirectory(directory, "/elsewhere/worker.sock").close()
    assert (directory / "worker.sock").is_symlink()
    (directory / "worker.sock").unlink()
    (directory / "worker.sock").symlink_to("worker/worker.sock")
    (directory / "worker").mkdir()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(directory / "worker" / "worker.sock"))
        other.listen()
        RunDirectory(directory, "/elsewhere/worker.sock").close()
        assert (directory / "worker.sock").is_symlink()


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
def test_movers_inherit_both_locks(directory: Path):
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
