"""The verbs that change a node, and the one that makes a key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvxferd.cli.root import root
from kvxferd.control.curve_keys import read_key
from kvxferd.errors import ConfigError
from tests.support.node_samples import PEER
from tests.support.other_user import NOBODY, needs_root, open_directory, run_as_nobody
from tests.support.verb_harness import run


@pytest.mark.parametrize(
    ("arguments", "code", "shown"),
    [
        (["drop-peer", PEER], 0, f"dropped {PEER}"),
        (["drop-peer", "tcp://1.2.3.4:5"], 2, "[not-found]"),
        (["cancel", "req-1"], 0, "cancelled transfer req-1 of decode-0@g1"),
        (["cancel", "req-1", "--json"], 0, '"cancelled": "req-1"'),
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
        (["drain", "--wait", "--json"], 1, '"drained": false'),
    ],
)
async def test_a_lever_says_what_it_did(socket: tuple[str, str], arguments, code, shown) -> None:
    result = await run(*arguments, *socket)
    assert result.exit_code == code
    assert shown in result.output


# --- keygen


def keygen(*arguments: str):
    return CliRunner().invoke(root, ["keygen", *arguments])


def test_a_key_is_written_once_for_its_owner_alone_and_its_public_half_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    made = keygen("--output", str(path))
    assert made.exit_code == 0
    assert path.stat().st_mode & 0o777 == 0o600
    key, text = read_key(path), path.read_text()
    assert made.stdout == f"{key.public}\n"
    assert str(path) in made.stderr
    assert keygen("--public", str(path)).output == made.stdout
    assert key.secret.hex() in text
    assert key.secret.hex() not in repr(key)
    assert key.secret.hex() not in made.output
    again = keygen("--output", str(path))
    assert again.exit_code == 2
    assert "a file is there" in again.output
    assert path.read_text() == text


DIGITS = "0" * 64


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        *((DIGITS, mode, "chmod 600") for mode in (0o640, 0o604, 0o660)),
        *(
            (text, 0o600, "64 hex digits")
            for text in ("", "g" * 64, DIGITS[1:], DIGITS + "0", f"{DIGITS}\n" * 2)
        ),
    ],
)
def test_a_file_that_others_may_read_or_without_a_key_is_refused(
    tmp_path: Path, text: str, mode: int, why: str
) -> None:
    path = tmp_path / "peer.key"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=why):
        read_key(path)


@pytest.mark.timeout(60)
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name, why in (("nothing", "kvxferd keygen"), ("", "Is a directory"), ("fifo", "64 hex digits")):
        with pytest.raises(ConfigError, match=why):
            read_key(tmp_path / name)


IMPORTS = """
from pathlib import Path
from kvxferd.control.curve_keys import read_key
from kvxferd.errors import ConfigError
"""
READ = """
try:
    read_key(Path(sys.argv[1]))
except ConfigError as error:
    print(error.message)
"""


@pytest.mark.process
@needs_root
def test_a_key_of_another_user_is_refused_with_how_to_hand_it_over() -> None:
    with open_directory() as directory:
        keygen("--output", str(directory / "peer.key"))
        said = run_as_nobody(READ, str(directory / "peer.key"), imports=IMPORTS)
    assert f"chown {NOBODY} {directory}/peer.key && chmod 600" in said
