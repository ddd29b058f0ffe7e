"""What a shell's completion offers, and what it loads for that."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest
from click.shell_completion import ShellComplete

from kvxferd.cli import options
from kvxferd.cli.completion import MAX_OFFERED, TIMEOUT_S
from kvxferd.cli.root import root
from kvxferd.config import CONFIG_PATH_VARIABLE
from kvxferd.core.snapshot import NodeSnapshot
from kvxferd.ids import TransferId
from tests.support.node_samples import StillNode, node_snapshot
from tests.support.verb_harness import daemon


def offered(*words: str) -> list[str]:
    """Return what is offered for the last word."""
    shell = ShellComplete(root, {}, "kvxferd", "_KVXFERD_COMPLETE")
    return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (["cancel", ""], ["req-1", "req-2"]),
        (["cancel", "--engine", "dec"], ["decode-0"]),
        (["cancel", "--pull", ""], ["9"]),
        (["disown", "gone"], ["gone-0"]),
        (["drop-peer", "tcp://10"], ["tcp://10.0.0.2:9441"]),
    ],
)
async def test_ids_are_those_of_the_daemon(tmp_path: Path, words: list[str], ids: list[str]) -> None:
    async with daemon(tmp_path) as config:
        for place in (str(tmp_path), config.control.socket):
            line = [words[0], "--socket", place, *words[1:]]
            assert await asyncio.to_thread(offered, *line) == ids


async def test_an_id_that_a_shell_would_run_is_not_offered(tmp_path: Path) -> None:
    odd = ["$(reboot)", "a;b", "a b", "`x`", "a\nb", "-rf\x1b[2J", "a|b", "ü", "~root", "a*", "-rf", "#x"]
    many = [f"req-{number:04}" for number in range(MAX_OFFERED + 5)]

    class Odd(StillNode):
        def snapshot(self) -> NodeSnapshot:
            node = node_snapshot()
            one = node.transfers[0]
            transfers = tuple(msgspec.structs.replace(one, transfer_id=TransferId(x)) for x in odd + many)
            return msgspec.structs.replace(node, transfers=transfers)

    async with daemon(tmp_path, Odd()):
        assert await asyncio.to_thread(offered, "cancel", "--socket", str(tmp_path), "") == many[:MAX_OFFERED]


async def test_without_a_daemon_or_with_a_stuck_one_nothing_is_offered_soon(tmp_path: Path) -> None:
    assert offered("cancel", "--socket", str(tmp_path), "") == []
    silent = await asyncio.start_unix_server(lambda reader, writer: None, tmp_path / "control.sock")
    async with silent:
        started = time.monotonic()
        assert await asyncio.to_thread(offered, "cancel", "--socket", str(tmp_path), "") == []
        assert time.monotonic() - started >= TIMEOUT_S


def test_the_variable_of_the_option_is_that_of_the_configuration() -> None:
    assert options.CONFIG_PATH_VARIABLE == CONFIG_PATH_VARIABLE
