"""The verbs that change a node, and the one that makes a key."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvxferd.cli.root import root
from kvxferd.control.curve_keys import read_key
from kvxferd.errors import ConfigError
from tests.support.node_samples import PEER, StillNode
from tests.support.other_user import NOBODY, needs_root, open_directory, run_as
from tests.support.verb_harness import daemon, run


@pytest.mark.parametrize(
    ("arguments", "code", "shown"),
    [
        (["drop-peer", PEER], 0, f"dropped {PEER}"),
        (["drop-peer", "tcp://1.2.3.4:5"], 2, "[not-found]"),
        (["cancel", "req-1"], 0, "cancelled transfer req-1 of decode-0@g1"),
        (["cancel", "req-1", "--engine", "other"], 2, "[transfer-unknown]"),
        (["cancel", "--pull", "9"], 0, "cancelled pull 9"),
        (["cancel", "--pull", "8"], 2, "[not-found]"),
        (["cancel"], 2, "either a TRANSFER or --pull N"),
        (["cancel", "req-1", "--pull", "9"], 2, "either a TRANSFER or --pull N"),
        (["disown", "gone-0"], 0, "disowned gone-0, which was uid 1000's; 2 ranks are free"),
        (["disown", "decode-0"], 2, "[rank-taken]"),
        (["disown", "nobodys-0"], 2, "no user is recorded for that id"),
        (["reload"], 0, "changed: log.level\nignored until a restart: http.bind\ndropped peer tcp"),
        (["drain"], 0, "draining"),
        (["drain", "--wait"], 1, "transfer req-1 of decode-0, granted"),
    ],
)
async def test_a_lever_says_what_it_did(tmp_path: Path, arguments, code, shown) -> None:
    async with daemon(tmp_path) as config:
        result = await run(*arguments, "--socket", config.control.socket)
    assert result.exit_code == code
    assert shown in result.output


async def test_json_is_one_object(tmp_path: Path) -> None:
    node = StillNode()
    async with daemon(tmp_path, node) as config:
        result = await run("cancel", "req-1", "--json", "--socket", config.control.socket)
        want = {"json_version": 1, "cancelled": "req-1", "engines": ["decode-0@g1"]}
        assert json.loads(result.stdout) == want
        result = await run("drain", "--wait", "--json", "--socket", config.control.socket)
        assert json.loads(result.stdout)["drained"] is False


# --- keygen


def keygen(*arguments: str):
    return CliRunner().invoke(root, ["keygen", *arguments])


def test_a_key_is_written_for_its_owner_alone_and_its_public_half_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    made = keygen("--output", str(path))
    assert made.exit_code == 0
    assert path.stat().st_mode & 0o777 == 0o600
    key = read_key(path)
    assert made.stdout == f"{key.public}\n"
    assert str(path) in made.stderr
    assert keygen("--public", str(path)).output == made.stdout
    assert key.secret.hex() in path.read_text()
    assert key.secret.hex() not in repr(key)
    assert key.secret.hex() not in made.output


def test_a_file_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    keygen("--output", str(path))
    before = path.read_text()
    again = keygen("--output", str(path))
    assert again.exit_code == 2
    assert "a file is there" in again.output
    assert path.read_text() == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "peer.key"
    keygen("--output", str(path))
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_key(path)


@pytest.mark.parametrize("text", ["", "short", "g" * 64, "0" * 63, "0" * 65, "0" * 64 + "\n" + "0" * 64])
def test_a_file_without_a_key_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "peer.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="64 hex digits"):
        read_key(path)


def test_a_file_that_is_not_there_is_refused_with_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kvxferd keygen"):
        read_key(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_key(tmp_path)


@pytest.mark.timeout(60)
def test_a_fifo_is_no_key_file_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "peer.key", 0o600)
    with pytest.raises(ConfigError, match="64 hex digits"):
        read_key(tmp_path / "peer.key")


@pytest.mark.process
@needs_root
def test_a_key_of_another_user_is_refused_with_how_to_hand_it_over() -> None:
    body = """
try:
    read_key(Path(sys.argv[1]))
except ConfigError as error:
    print(error.message)
"""
    imports = """
from pathlib import Path
from kvxferd.control.curve_keys import read_key
from kvxferd.errors import ConfigError
"""
    with open_directory() as directory:
        keygen("--output", str(directory / "peer.key"))
        said = run_as(body, str(directory / "peer.key"), imports=imports)
    assert f"chown {NOBODY} {directory}/peer.key && chmod 600" in said
