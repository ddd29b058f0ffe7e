"""The command as a process: what it prints where, and with which code it ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from click.shell_completion import ShellComplete

import kvxferd
from kvxferd.cli import options
from kvxferd.cli.completion import MAX_OFFERED, TIMEOUT_S
from kvxferd.cli.root import root
from kvxferd.config import CONFIG_PATH_VARIABLE, SETTINGS, flag_name
from kvxferd.ids import TransferId
from kvxferd.records import NodeSnapshot
from kvxferd.tooling.output import format_bytes, format_count, plain_text
from tests.support.node_samples import StillNode, node_snapshot
from tests.support.python_process import run_kvxferd
from tests.support.verb_harness import daemon, run


@pytest.mark.process
def test_version() -> None:
    assert run_kvxferd("--version").stdout == f"kvxferd, version {kvxferd.__version__}\n"


async def test_serve_has_a_flag_for_every_setting() -> None:
    text = (await run("serve", "--help")).stdout
    for key in SETTINGS:
        assert f"{flag_name(key)} " in text


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "environ", "names"),
    [
        (["serve", "--transfer-lease-s", "soon"], {}, ["transfer.lease_s", "--transfer-lease-s"]),
        (["serve", "--config", "/nowhere.toml"], {}, ["/nowhere.toml"]),
        (["serve"], {"KVXFERD_LEASE": "3"}, ["KVXFERD_LEASE"]),
        (["serve"], {"KVXFERD_CONFIG": "/nowhere.toml"}, ["/nowhere.toml"]),
        (["demo", "--prefill-pp", "9", "--layers", "4"], {}, ["--prefill-pp 9", "--layers 4"]),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str], environ: dict[str, str], names: list[str]
) -> None:
    done = run_kvxferd(*arguments, **environ)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("kvxferd: cannot ")
    assert done.stderr.count("\n") == 1
    for name in names:
        assert name in done.stderr


@pytest.mark.parametrize(
    ("count", "want"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (5 << 40, "5.0 TiB")],
)
def test_sizes(count: int, want: str) -> None:
    assert format_bytes(count) == want


def test_names_from_outside_cannot_steer_a_terminal() -> None:
    assert plain_text("[red]\x1b[2Jx").plain == "[red]\N{REPLACEMENT CHARACTER}[2Jx"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["statsu"], "No such command 'statsu'. Did you mean 'status'?"),
        (["config", "chek"], "No such command 'chek'. Did you mean 'check'?"),
        (["zzz"], "No such command 'zzz'."),
        (["\x1b[2Jstatus"], "No such command '\\x1b[2Jstatus'. Did you mean 'status'?"),
        (["status", "--sokcet", "x"], "'--socket'"),
    ],
)
async def test_a_mistyped_verb_or_option_is_an_error_with_a_hint(arguments: list[str], hint: str) -> None:
    result = await run(*arguments)
    assert result.exit_code == 2
    assert hint in result.stderr
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize(
    ("count", "want"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks"), (1500, "1,500 ranks")]
)
def test_counts(count: int, want: str) -> None:
    assert format_count(count, "rank") == want


# --- what a shell's completion offers, and what it loads for that


def offered(*words: str) -> list[str]:
    """Return what is offered for the last word."""
    shell = ShellComplete(root, {}, "kvxferd", "_KVXFERD_COMPLETE")
    return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]


def test_verbs_and_options_are_offered() -> None:
    assert offered("st") == ["status"]
    assert "--transfer-lease-s" in offered("serve", "--transfer-l")


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


# --- what the daemon's process is before it serves


LOOK = """
import gc
from kvxferd.cli.serve import freeze_imports
import kvxferd.daemon

before = len(gc.get_objects())
freeze_imports()
print(before, len(gc.get_objects()))
"""


@pytest.mark.process
def test_the_garbage_collector_does_not_look_at_what_was_imported():
    """In its own process: what is set aside stays so."""
    said = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True)
    before, after = map(int, said.stdout.split())
    assert before > 10_000
    assert after < before / 20
