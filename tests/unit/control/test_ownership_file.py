"""The file that says whose ranks are: written whole, read whole, put aside when it is nonsense."""

from __future__ import annotations

import asyncio
import errno
import itertools
import tempfile
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvxferd.control import ownership_file
from kvxferd.control.ownership_file import OwnershipFile, SavedRanks

KEPT = (("prefill", "g1", 1, 0, "key:0a"), ("decode \u00e9", "g1", 0, 0, "uid:1000"))


async def test_what_is_saved_is_read_in_its_order(tmp_path: Path):
    listed = [KEPT[:1]]
    file = OwnershipFile(tmp_path / "owners.json", lambda: listed[-1])
    assert file.read() == ()
    file.save_soon()
    listed.append(KEPT)
    file.save_soon()
    async with asyncio.timeout(10):
        await file._save_task
    assert OwnershipFile(tmp_path / "owners.json", tuple).read() == KEPT
    assert (tmp_path / "owners.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["owners.json"]


async def test_closing_waits_for_the_write_that_runs_and_writes_the_last_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    began, go_on, make = threading.Event(), threading.Event(), tempfile.mkstemp

    def make_slowly(*args: object) -> tuple[int, str]:
        began.set()
        assert go_on.wait(30)
        return make(*args)

    monkeypatch.setattr(tempfile, "mkstemp", make_slowly)
    listed = [KEPT[:1]]
    file = OwnershipFile(tmp_path / "owners.json", lambda: listed[-1])
    file.save_soon()
    assert await asyncio.to_thread(began.wait, 10)
    listed.append(KEPT)
    closing = asyncio.create_task(file.close())
    try:
        done, _ = await asyncio.wait([closing], timeout=0.3)
    finally:
        go_on.set()
    assert not done
    await asyncio.wait_for(closing, 10)
    assert file.read() == KEPT
    assert [path.name for path in tmp_path.iterdir()] == ["owners.json"]


def test_what_a_killed_daemon_had_begun_to_write_is_removed(tmp_path: Path):
    (tmp_path / "owners.x1.new").touch()
    assert OwnershipFile(tmp_path / "owners.json", tuple).read() == ()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b'{"a": "b"}', b"\xff" * 100, b"[" * 100_000, b'[["e", "g", 0, 0, "uid:root"]]'],
)
def test_nonsense_is_put_aside_and_nobody_owns_anything(tmp_path: Path, content: bytes):
    path = tmp_path / "owners.json"
    path.write_bytes(content)
    assert OwnershipFile(path, tuple).read() == ()
    assert (tmp_path / "owners.unreadable").read_bytes() == content
    assert not path.exists()


async def test_a_disk_that_refuses_is_no_end(tmp_path: Path):
    file = OwnershipFile(tmp_path / "nowhere" / "owners.json", lambda: KEPT)
    file.save_soon()
    await file.close()
    assert not (tmp_path / "nowhere").exists()


async def test_closing_tries_once_more_where_the_write_that_runs_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    began, go_on, make = threading.Event(), threading.Event(), tempfile.mkstemp

    def fail_slowly(*args: object) -> tuple[int, str]:
        monkeypatch.setattr(tempfile, "mkstemp", make)
        began.set()
        assert go_on.wait(30)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkstemp", fail_slowly)
    file = OwnershipFile(tmp_path / "owners.json", lambda: KEPT)
    file.save_soon()
    assert await asyncio.to_thread(began.wait, 10)
    closing = asyncio.create_task(file.close())
    await asyncio.sleep(0)  # it waits for the write
    go_on.set()
    await asyncio.wait_for(closing, 10)
    assert file.read() == KEPT


def _no_space(*args: object) -> tuple[int, str]:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("what_is_short", ["threads", "disk"])
async def test_what_could_not_be_written_is_written_later_without_a_change(
    tmp_path: Path, no_thread_left, monkeypatch: pytest.MonkeyPatch, what_is_short: str
):
    monkeypatch.setattr(ownership_file, "RETRY_S", 0.05)
    found, asked = asyncio.get_running_loop().create_future(), itertools.count(1)

    def current() -> SavedRanks:
        if next(asked) == 5:  # the first four are of two writes, which fail
            found.set_result(file.read())
        return KEPT

    file = OwnershipFile(tmp_path / "owners.json", current)
    with no_thread_left() if what_is_short == "threads" else monkeypatch.context() as short:
        if short is not None:
            short.setattr(tempfile, "mkstemp", _no_space)
        with capture_logs() as logs:
            file.save_soon()
            assert await asyncio.wait_for(found, 10) == ()
    assert [line["event"] for line in logs] == ["ownership file not written"]  # once for its reason
    await asyncio.wait_for(file._save_task, 10)
    assert file.read() == KEPT
