"""The file of allowed keys: what is read and refused, and what a watcher makes of each way to write it."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from queue import Queue

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.config import PeerConfig
from kvxferd.control import allowed_keys_file
from kvxferd.control.allowed_keys_file import (
    MAX_FILE_BYTES,
    AllowedKeysFile,
    KeysRead,
    read_allowed_keys,
)
from kvxferd.control.curve_keys import allowlist_of, make_key
from kvxferd.errors import ConfigError

A, B, C = "0a" * 32, "0b" * 32, "0c" * 32
WAIT_S = 20.0
COMMENTS = st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=20)


@pytest.mark.slow
@given(st.lists(st.tuples(st.binary(min_size=32, max_size=32), COMMENTS), min_size=1, max_size=20))
def test_each_line_is_a_key_with_a_comment(tmp_path_factory: pytest.TempPathFactory, listed) -> None:
    path = tmp_path_factory.getbasetemp() / "allowed"
    lines = [f"  {key.hex().upper()} # {comment}" for key, comment in listed]
    path.write_bytes(("# all nodes\n\n" + "\n".join(lines)).encode())
    assert read_allowed_keys(path) == {key.hex() for key, _ in listed}


@given(st.binary(max_size=200))
def test_any_bytes_are_keys_or_one_error(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "allowed"
    path.write_bytes(text)
    try:
        keys, message = read_allowed_keys(path), "cannot use peer.curve_allowed_keys_file"
    except ConfigError as error:
        keys, message = frozenset(), error.message
    assert message.startswith("cannot use peer.curve_allowed_keys_file")
    assert all(key.encode() in text.lower() for key in keys)


def _open_to_all(path: Path) -> None:
    path.write_text(A)
    path.chmod(0o666)


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda path: None, "No such file"),
        (Path.mkdir, "cannot use"),
        (os.mkfifo, "it is no file"),
        (lambda path: path.write_text("\n"), "it is empty"),
        (lambda path: path.write_text(f"{A}\n{B[:40]}"), "line 2 holds no public key"),
        (lambda path: path.write_text("#" * (MAX_FILE_BYTES + 1)), "bytes"),
        (lambda path: path.write_text("any"), "line 1"),
        (_open_to_all, "chmod o-w"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, write: Callable[[Path], None], says: str) -> None:
    path = tmp_path / "allowed"
    write(path)
    with pytest.raises(ConfigError, match=says) as refused:
        read_allowed_keys(path)
    assert B[:40] not in refused.value.message  # it may be a secret
    with pytest.raises(ConfigError):
        AllowedKeysFile(str(path))


def test_the_secret_key_is_no_list(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    make_key(path)
    with pytest.raises(ConfigError, match="curve_secret_key_file"):
        read_allowed_keys(path, str(path))


def test_a_file_of_comments_admits_nobody_else(tmp_path: Path) -> None:
    path = tmp_path / "allowed"
    path.write_text("# none yet\n")
    assert read_allowed_keys(path) == frozenset()
    lists = allowlist_of(PeerConfig(curve_allowed_keys=(A,)), None, frozenset({B}))
    assert [lists.allows_key(key) for key in (A, B, C)] == [True, True, False]


def look_until_same(keys_file: AllowedKeysFile) -> KeysRead | None:
    """Return what a change leads to: one look sees it, the next finds the file the same and reads it."""
    assert keys_file.look() is None
    found = keys_file.look()
    assert keys_file.look() is None, "a change is told once"
    return found


def _replace(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def _swap_links(path: Path, text: str) -> None:
    """As the kubelet updates a ConfigMap: the file is a link into a directory that a link names."""
    version = path.parent / f"..{len(os.listdir(path.parent))}"
    version.mkdir()
    (version / path.name).write_text(text)
    new = path.parent / "..new"
    new.symlink_to(version.name)
    new.replace(path.parent / "..data")
    if not path.is_symlink():
        path.unlink(missing_ok=True)
        path.symlink_to(Path("..data") / path.name)


@pytest.mark.parametrize("write", [_replace, Path.write_text, _swap_links])
def test_a_change_is_read_and_a_bad_file_keeps_the_list(
    tmp_path: Path, write: Callable[[Path, str], None]
) -> None:
    path = tmp_path / "allowed"
    write(path, f"{A}\n")
    keys_file = AllowedKeysFile(str(path))
    write(path, f"{A}\n{B}  # a new node\n")
    assert look_until_same(keys_file) == KeysRead(frozenset({A, B}))
    write(path, "")
    bad = look_until_same(keys_file)
    assert bad is not None
    assert bad.keys == keys_file.keys == {A, B}
    assert "it is empty" in bad.problem
    assert bad.problem == keys_file.problem
    assert "write a comment" in bad.problem
    write(path, f"{C}\n")
    assert look_until_same(keys_file) == KeysRead(frozenset({C}))
    assert keys_file.problem == ""
    path.unlink()
    gone = look_until_same(keys_file)
    assert gone is not None
    assert gone.keys == {C}


def test_a_change_that_comes_while_no_descriptor_is_left_is_read_later(tmp_path: Path) -> None:
    path = tmp_path / "allowed"
    path.write_text(f"{A}\n")
    keys_file = AllowedKeysFile(str(path))
    _replace(path, f"{A}\n{B}\n")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        unread = look_until_same(keys_file)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert unread is not None
    assert "Too many open files" in unread.problem
    assert keys_file.look() == KeysRead(frozenset({A, B}))
    assert keys_file.look() is None


def test_a_reload_reads_at_once_and_a_bad_path_changes_nothing(tmp_path: Path) -> None:
    path, other = tmp_path / "allowed", tmp_path / "other"
    path.write_text(A)
    other.write_text(B)
    keys_file = AllowedKeysFile(str(path))
    with pytest.raises(ConfigError):
        keys_file.use(str(tmp_path / "missing"))
    assert keys_file.keys == {A}
    keys_file.use(str(other))
    assert keys_file.keys == {B}
    assert look_until_same(keys_file) is None
    # An editor that writes in place may be seen between two writes.
    other.write_text("")
    assert keys_file.look() is None
    other.write_text(f"{C}\n")  # another size: two writes in one tick of the clock have one time
    assert look_until_same(keys_file) == KeysRead(frozenset({C}))
    keys_file.use("")
    assert keys_file.keys == frozenset()
    other.write_text(A)
    assert look_until_same(keys_file) is None


def test_a_thread_looks_until_it_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowed_keys_file, "POLL_S", 0.01)
    path = tmp_path / "allowed"
    path.write_text(A)
    keys_file = AllowedKeysFile(str(path))
    seen: Queue[KeysRead] = Queue()
    keys_file.start(seen.put)
    try:
        _replace(path, B)
        assert seen.get(timeout=WAIT_S) == KeysRead(frozenset({B}))
    finally:
        keys_file.stop()
