"""The command as a process: what it prints where, and with which code it ends."""

import os
import subprocess
import sys

import pytest

import kvxferd
from kvxferd.config import SETTINGS, flag_name
from kvxferd.config.sample import sample_comments
from kvxferd.tooling.output import format_bytes, format_count, format_duration, plain_text
from tests.support.verb_harness import run


def kvxferd_process(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m kvxferd.cli` with these arguments and this addition to the environment."""
    return subprocess.run(
        [sys.executable, "-m", "kvxferd.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environ,
        check=False,
    )


@pytest.mark.process
def test_version() -> None:
    assert kvxferd_process("--version").stdout == f"kvxferd, version {kvxferd.__version__}\n"


@pytest.mark.process
def test_serve_has_a_flag_for_every_setting() -> None:
    text = kvxferd_process("serve", "--help").stdout
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
    done = kvxferd_process(*arguments, **environ)
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


@pytest.mark.parametrize(("seconds", "want"), [(0.0000125, "12.5 us"), (0.0123, "12.3 ms"), (61, "61.0 s")])
def test_times(seconds: float, want: str) -> None:
    assert format_duration(seconds) == want


def test_names_from_outside_cannot_steer_a_terminal() -> None:
    assert plain_text("[red]\x1b[2Jx").plain == "[red]\N{REPLACEMENT CHARACTER}[2Jx"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["statsu"], "No such command 'statsu'. Did you mean status?"),
        (["config", "chek"], "No such command 'chek'. Did you mean check?"),
        (["zzz"], "No such command 'zzz'."),
        (["\x1b[2Jstatus"], "No such command '\\x1b[2Jstatus'. Did you mean status?"),
        (["status", "--sokcet", "x"], "'--socket'"),
    ],
)
async def test_a_mistyped_verb_or_option_is_an_error_with_a_hint(arguments: list[str], hint: str) -> None:
    result = await run(*arguments)
    assert result.exit_code == 2
    assert hint in result.stderr
    assert "\x1b" not in result.stderr


async def test_serve_help_explains_each_setting_as_the_sample_does() -> None:
    text = " ".join((await run("serve", "--help")).stdout.split())
    comments = sample_comments()
    assert set(comments.keys) == set(SETTINGS)
    for section in {setting.section for setting in SETTINGS.values()}:
        assert text.count(f"Settings of [{section}]:") == 1
    for key, setting in SETTINGS.items():
        flag = text.index(f"{flag_name(key)} VALUE")
        entry = text[flag : text.index("Default:", flag)]
        # The help breaks lines behind hyphens and slashes too.
        squeezed = entry.replace(" ", "")
        assert comments.keys[key].replace(" ", "") in squeezed or "As above." in entry, key
        assert f"Value: {setting.expected_as_text}.".replace(" ", "") in squeezed
    for text_of_table in comments.sections.values():
        assert text_of_table.replace(" ", "") in text.replace(" ", "")


@pytest.mark.parametrize(
    ("count", "want"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks"), (1500, "1,500 ranks")]
)
def test_counts(count: int, want: str) -> None:
    assert format_count(count, "rank") == want
