"""The command as a process: what it prints where, and with which code it ends."""

from __future__ import annotations

import pytest

import kvxferd
from tests.support.python_process import run_kvxferd
from tests.support.verb_harness import run


@pytest.mark.process
def test_version() -> None:
    assert run_kvxferd("--version").stdout == f"kvxferd, version {kvxferd.__version__}\n"


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
