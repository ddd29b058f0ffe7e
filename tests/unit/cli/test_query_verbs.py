"""The verbs that ask a daemon: against a real server on a real socket."""

import asyncio
import json
from pathlib import Path

import pytest

from kvxferd.control import http_routes
from kvxferd.telemetry.log_buffer import LogBuffer
from tests.support.node_samples import StillNode
from tests.support.verb_harness import daemon, run

# Of each table some texts, each of which says a fact in words of its own.
SHOWN = {
    "status": (
        "tcp://10.0.0.1:9441",
        "Pulls fail: 1 of 3 failed in the last 20 s (33.3 %), most with lease-expired from "
        "tcp://10.0.0.2:9441.",
        *("2, 1 readable", "9.44 MB", "1 running, 4 quarantined", "retired movers  3"),
        *("2 recorded, 1 without ranks here; 2 ranks kept", "2 pulls, 105 kB/s in"),
        "failures        1 lease-expired; kvxferd history --failed shows them",
    ),
    "engines": ("decode-0", "pp0.tp1", "lacks pp1.tp0", "3.15 MB", "0-15", "gone-0", "5 min"),
    "peers": ("tcp://10.0.0.2:9441", "up", "prefill-0@g7 (8 ranks)"),
    "transfers": ("req-1", "granted", "512/1000", "req-3", "wire", "256/1000 tokens, 8.39 MB", "12.5 s"),
    "history": (
        *("req-0", "decode-0 pp0.tp1", "tcp://10.0.0.2:9441", "1.05 MB", "75% covering, 25% direct"),
        *("9 ms", "2027-01-15 08:00:00.512Z", "wire 10 ms", "lease-expired", "5.24 MB", "SLOWEST"),
        "in grant: cannot pull",
    ),
}


@pytest.mark.parametrize("verb", SHOWN)
async def test_a_verb_shows_a_table_or_one_json_object(socket: tuple[str, str], verb: str) -> None:
    result = await run(verb, *socket)
    assert result.exit_code == 0, result.output
    for text in SHOWN[verb]:
        assert text in result.stdout
    assert isinstance(json.loads((await run(verb, "--json", *socket)).stdout), dict)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("decode-0", {"engines", "ownerships", "transfers", "pulls", "history"}),
        ("req-1", {"transfers"}),
        ("req-0", {"history"}),
        ("10.0.0.2:9441", {"peers"}),
        ("prefill-0", {"peers", "pulls", "history"}),
    ],
)
async def test_inspect_shows_all_that_has_a_name(socket: tuple[str, str], name: str, kinds: set[str]) -> None:
    result = await run("inspect", name, *socket)
    assert result.exit_code == 0, result.output
    assert set(json.loads(result.stdout)) == {"json_version", *kinds}


async def test_inspect_of_an_unknown_name_says_which_verbs_have_names(socket: tuple[str, str]) -> None:
    result = await run("inspect", "nobody", *socket)
    assert result.exit_code == 2
    assert "cannot find 'nobody': 'kvxferd engines'" in result.stderr


async def test_logs_prints_the_last_lines_with_the_errors_among_them(
    socket: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_routes, "LOG_BUFFER", buffer := LogBuffer())
    for number, is_error in enumerate([False, True, False, False]):
        buffer.put(f"line {number}\x1b[2J", is_error)
    last = [f"line {number}\N{REPLACEMENT CHARACTER}[2J" for number in (1, 2, 3)]
    assert (await run("logs", "-n", "3", *socket)).stdout.splitlines() == last
    assert (await run("logs", "-n", "0", *socket)).stdout == ""


async def test_a_node_that_is_not_ready_says_why(tmp_path: Path) -> None:
    async with daemon(tmp_path, StillNode(["nixl cannot be imported"])) as config:
        result = await run("status", "--socket", config.control.socket)
        as_json = await run("status", "--json", "--socket", config.control.socket)
    assert (result.exit_code, as_json.exit_code) == (1, 1)
    assert "Not ready: nixl cannot be imported." in result.stdout
    assert json.loads(as_json.stdout)["ready"] is False


@pytest.mark.parametrize("verb", ["status", "engines", "history", "drain"])
async def test_without_a_daemon_a_sentence_says_what_to_do(tmp_path: Path, verb: str) -> None:
    result = await run(verb, "--socket", str(tmp_path / "control.sock"))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("kvxferd: cannot ask the daemon at ")
    assert "kvxferd serve" in result.stderr
    assert result.stderr.endswith("[daemon-lost]\n")
    assert result.stderr.count("\n") == 1


async def test_a_server_that_speaks_something_else(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"\x1bd...t..farewell\r\n")
        writer.close()

    async with await asyncio.start_unix_server(reply, path):
        result = await run("status", "--socket", str(path))
    assert result.exit_code == 2
    assert result.stderr.startswith("kvxferd: cannot ask")
    assert "name the daemon's control.sock, not its worker socket" in result.stderr
    assert "farewell" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["engines"], ["decode-0", "<b>odd</b>"]),
        (["engines", "--sort", "engine"], ["<b>odd</b>", "decode-0"]),
        (["engines", "--sort", "-layers"], ["<b>odd</b>", "decode-0"]),
        (["transfers", "--sort", "-transfer"], ["req-2", "req-1"]),
        (["peers"], ["tcp://10.0.0.2:9441"]),
    ],
)
async def test_names_alone_are_a_line_each(
    socket: tuple[str, str], arguments: list[str], names: list[str]
) -> None:
    result = await run(*arguments, "-o", "name", *socket)
    assert (result.exit_code, result.stdout.splitlines()) == (0, names)


async def test_forms_of_a_list(socket: tuple[str, str]) -> None:
    as_json = await run("peers", "-o", "json", *socket)
    assert as_json.stdout == (await run("peers", "--json", *socket)).stdout
    assert "boot-b" in (await run("peers", "-o", "wide", *socket)).stdout
    odd = await run("peers", "--sort", "colour", *socket)
    assert odd.exit_code == 2
    assert "'colour' is no column: peer, state, " in odd.stderr
    unset = await run("engines", "--sort", "-GB/s", *socket)  # a rank that was not measured comes last
    ranks = unset.stdout.partition("Ranks\n")[2].partition("Recorded")[0].splitlines()[1:]
    assert [line.split()[0] for line in ranks] == ["decode-0", "decode-0", "<b>odd</b>"]
