"""The example router as a process of its own."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request

from tests.support.nodes.waiting import wait_until
from tests.support.ports import free_port
from tests.support.repository import ROOT
from tests.support.server_group import HOST

SCRIPT = ROOT / "examples" / "pd_router.py"


class RouterProcess:
    """Sends each completion to the prefill engine, then to the decode engine; with `--overlap` to both."""

    def __init__(self, prefill_url: str, decode_url: str, *options: str) -> None:
        port = free_port()
        self.url = f"http://{HOST}:{port}"
        command = [sys.executable, str(SCRIPT), "--port", str(port)]
        command += ["--prefill", prefill_url, "--decode", decode_url, *options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_until(self._replies, "the router answers", 20.0)

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(20)

    def _replies(self) -> bool:
        assert self._process.poll() is None, "the router ended"
        try:
            urllib.request.urlopen(self.url, timeout=2).close()
        except urllib.error.HTTPError:
            return True  # it knows no such page: it is there
        except OSError:
            return False
        return True
