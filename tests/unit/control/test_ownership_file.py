"""The file that says whose engine ids are: written whole, read whole, put aside when it is nonsense."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from kvxferd.control.ownership_file import OwnershipFile

OWNED = (("prefill", 1000), ("decode \u00e9", 0))
RANKS = (("prefill", "g1", 1, 0, "key:0a"), ("prefill", "g1", 0, 0, "uid:1000"))
KEPT = (OWNED, RANKS)
NOTHING = ((), ())


async def test_what_is_saved_is_read_in_its_order(tmp_path: Path):
    listed = [(OWNED[:1], ())]
    file = OwnershipFile(tmp_path / "owners.json", lambda: listed[-1])
    assert file.read() == NOTHING
    file.save_soon()
    listed.append(KEPT)
    file.save_soon()
    async with asyncio.timeout(10):
        await file._save_task
    assert OwnershipFile(tmp_path / "owners.json", tuple).read() == KEPT
    assert (tmp_path / "owners.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["owners.json"]


async def test_closing_writes_what_waits(tmp_path: Path):
    file = OwnershipFile(tmp_path / "owners.json", lambda: KEPT)
    file.save_soon()
    await file.close()
    assert file.read() == KEPT


class Slow(tuple):
    """A list whose writing lasts until it may go on."""

    began, go_on = threading.Event(), threading.Event()

    def __iter__(self):
        self.began.set()
        assert self.go_on.wait(30)
        return super().__iter__()


async def test_closing_waits_for_the_write_that_runs_and_writes_the_last_list(tmp_path: Path):
    listed = [(Slow(OWNED[:1]), ())]
    file = OwnershipFile(tmp_path / "owners.json", lambda: listed[-1])
    file.save_soon()
    assert await asyncio.to_thread(Slow.began.wait, 10)
    listed.append(KEPT)
    closing = asyncio.create_task(file.close())
    try:
        done, _ = await asyncio.wait([closing], timeout=0.3)
    finally:
        Slow.go_on.set()
    assert not done
    await asyncio.wait_for(closing, 10)
    assert file.read() == KEPT
    assert [path.name for path in tmp_path.iterdir()] == ["owners.json"]


def test_what_a_killed_daemon_had_begun_to_write_is_removed(tmp_path: Path):
    (tmp_path / "owners.x1.new").touch()
    assert OwnershipFile(tmp_path / "owners.json", tuple).read() == NOTHING
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": "b"}', b"\xff" * 100, b"[" * 100_000])
def test_nonsense_is_put_aside_and_nobody_owns_anything(tmp_path: Path, content: bytes):
    path = tmp_path / "owners.json"
    path.write_bytes(content)
    assert OwnershipFile(path, tuple).read() == NOTHING
    assert (tmp_path / "owners.unreadable").read_bytes() == content
    assert not path.exists()


async def test_a_disk_that_refuses_is_no_end(tmp_path: Path):
    file = OwnershipFile(tmp_path / "nowhere" / "owners.json", lambda: KEPT)
    file.save_soon()
    async with asyncio.timeout(10):
        await file._save_task
    assert not (tmp_path / "nowhere").exists()


async def test_without_a_thread_nothing_is_raised_and_a_later_change_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    file = OwnershipFile(tmp_path / "owners.json", lambda: KEPT)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        file.save_soon()
        async with asyncio.timeout(10):
            await file._save_task
        await file.close()
    assert file.read() == NOTHING
    await file.close()
    assert file.read() == KEPT
