"""Debian's Chromium without a window, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

START_S = 60.0
REPLY_S = 30.0
# As root it starts only without its sandbox; it loads what the tests serve, and nothing else.
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-extensions", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-port=0"),
    *(
        "--remote-allow-origins=*",
        "--window-size=1300,1000",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ),
)


def find_browser() -> str | None:
    """Return the path of a Chromium; None where there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """One page of the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.errors: list[str] = []  # what the console reported, policy violations too

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of a command."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(REPLY_S):
            while True:
                message = await self._socket.receive_json()
                if message.get("method") == "Log.entryAdded":
                    self.errors.append(message["params"]["entry"]["text"])
                elif message.get("method") == "Runtime.exceptionThrown":
                    self.errors.append(str(message["params"]["exceptionDetails"]))
                elif message.get("id") == number:
                    if "error" in message:
                        raise RuntimeError(message["error"])
                    result: dict[str, Any] = message["result"]
                    return result

    async def open(self, url: str) -> None:
        """Load an address, and wait until it is there."""
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(REPLY_S):
            while await self.evaluate("document.readyState") != "complete":  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def evaluate(self, script: str) -> Any:
        """Return the value of an expression."""
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    async def text(self) -> str:
        """Return what stands on the page."""
        return str(await self.evaluate("document.body.innerText"))


@asynccontextmanager
async def browser_page(executable: str) -> AsyncIterator[Page]:
    """Start a browser with one page; it is gone at the end."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            executable,
            *FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            env={**os.environ, "HOME": profile},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            port = await _debugging_port(Path(profile, "DevToolsActivePort"))
            async with aiohttp.ClientSession() as client:
                async with client.get(f"http://127.0.0.1:{port}/json/list") as reply:
                    target = next(t for t in await reply.json() if t["type"] == "page")
                async with client.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=64 << 20) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Log"):
                        await page.call(f"{domain}.enable")
                    yield page
        finally:
            # Its own session: renderers and the zygote end with it.
            if process.returncode is None:
                os.killpg(process.pid, 9)
            await process.wait()


async def _debugging_port(path: Path) -> int:
    async with asyncio.timeout(START_S):
        while not path.exists() or not path.read_text().strip():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return int(path.read_text().splitlines()[0])
