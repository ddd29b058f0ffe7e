"""Whatever a child process does, the tool gets an error in time, and the process is gone afterwards."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from kvxferd.errors import Code, KvxferdError
from kvxferd.tooling import subprocesses
from kvxferd.tooling.line_protocol import CommandFailed, Line, LineProtocol
from kvxferd.tooling.subprocesses import CommandProcess
from tests.support.python_process import run_python
from tests.support.tool_process import await_end

pytestmark = pytest.mark.process


class Echo(Line, frozen=True):
    text: str


class Count(Line, frozen=True):
    number: int


PROTOCOL: LineProtocol[Echo, Echo | Count | CommandFailed] = LineProtocol(Echo, Echo | Count | CommandFailed)

CHILDREN = {
    "echoes": "import sys\nfor line in sys.stdin: print(line, end='', flush=True)",
    "garbage": "import sys\nfor line in sys.stdin: print('no json', flush=True)",
    "other": 'import sys\nfor line in sys.stdin: print(\'{"t":"Count","number":1}\', flush=True)',
    "fails": (
        'import sys\nfor line in sys.stdin: print(\'{"t":"CommandFailed","message":"why"}\', flush=True)'
    ),
    "dies": "import os, sys\nos.read(0, 10)\nsys.exit('its last words')",
    "deaf": "import time\ntime.sleep(1000)",
    "mute": "import sys\nfor line in sys.stdin: pass",
    "endless": "import os\nos.read(0, 10)\nwhile True: os.write(1, bytes(1 << 16))",
}
# More than the pipe, the buffer of the sender and that of a reader hold together.
LARGE = "x" * (4 << 20)

Start = Callable[[str], Awaitable[CommandProcess]]


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Start one of the children; each is stopped, and must be gone then."""
    monkeypatch.setattr(subprocesses, "STOP_TIMEOUT_S", 0.5)
    started: list[CommandProcess] = []

    async def start(kind: str) -> CommandProcess:
        module = f"child_{kind}"
        (tmp_path / f"{module}.py").write_text(CHILDREN[kind])
        environment = {"PYTHONPATH": str(tmp_path)}
        started.append(await CommandProcess.start("the test", module, kind, tmp_path, PROTOCOL, environment))
        return started[-1]

    yield start
    for process in started:
        await process.stop()
        await process.stop()
        assert not Path(f"/proc/{process.pid}").exists()


@pytest.mark.parametrize("text", ["", LARGE])
async def test_a_reply(start: Start, text: str) -> None:
    assert await (await start("echoes")).request(Echo(text=text), Echo) == Echo(text=text)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("garbage", "process garbage sent no valid reply: JSON is malformed"),
        ("other", "process other sent Count instead of Echo"),
        ("fails", "process fails: why"),
        ("dies", "process dies ended: its last words"),
    ],
)
@pytest.mark.parametrize("text", ["", LARGE])
async def test_what_is_no_reply_is_an_error(start: Start, kind: str, message: str, text: str) -> None:
    process = await start(kind)
    with pytest.raises(KvxferdError) as raised:
        await process.request(Echo(text=text), Echo)
    assert raised.value.message.startswith(f"cannot run the test: {message}")


@pytest.mark.parametrize("kind", ["deaf", "mute"])
@pytest.mark.parametrize("text", ["", LARGE])
async def test_no_reply_is_an_error_in_time(
    start: Start, kind: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocesses, "REPLY_TIMEOUT_S", 0.5)
    process = await start(kind)
    with pytest.raises(KvxferdError, match="has not answered") as raised:
        await process.request(Echo(text=text), Echo)
    assert raised.value.code is Code.DEADLINE


async def test_a_line_without_an_end_is_an_error_and_its_process_can_be_stopped(start: Start) -> None:
    process = await start("endless")
    with pytest.raises(KvxferdError, match="sent a line of more than"):
        await process.request(Echo(text=""), Echo)


async def test_a_paused_process_ends_at_once(start: Start) -> None:
    process = await start("echoes")
    await process.request(Echo(text=""), Echo)
    await process.pause()
    await process.stop()
    assert process._process.returncode == 0


KILLED = """
import asyncio, os, signal, sys
from contextlib import suppress
from pathlib import Path
from kvxferd.bench.protocol import PROTOCOL, AwaitRelease, CommandDone
from kvxferd.errors import KvxferdError
from kvxferd.tooling.subprocesses import CommandProcess

async def main():
    module, directory = "kvxferd.bench.rank_process", Path(sys.argv[1])
    process = await CommandProcess.start("the test", module, "rank", directory, PROTOCOL)
    print(process.pid, flush=True)
    if sys.argv[2] == "paused":
        with suppress(KvxferdError):  # it is no rank, but it runs
            await process.request(AwaitRelease(names=[]), CommandDone)
        await process.pause()
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.parametrize("state", ["just started", "paused"])
def test_a_child_goes_with_a_parent_that_is_killed(tmp_path: Path, state: str) -> None:
    ended = run_python("-c", KILLED, str(tmp_path), state)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    await_end(int(ended.stdout))
