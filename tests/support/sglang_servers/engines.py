"""Real SGLang servers on a CPU: one alone, or a prefill and a decode engine at their daemons."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.nodes.waiting import wait_until
from tests.support.ports import free_port
from tests.support.server_group import HOST, ServerGroup

START_S = 600.0  # of a machine that others use too; by itself an engine takes half a minute
LIMIT_S = 120.0  # for a reply
STAND_INS = Path(__file__).parent / "stand_ins"
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(STAND_INS),
    # Pages that are missing while nothing runs end the engine.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    # An overlapped prefill sends a cached prefix behind an event of CUDA's, which a CPU has not.
    "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
    # For which a prefill engine keeps a request whose decode engine was killed before it had pages for it; by
    # itself 300 s.
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "60",
}
FLAGS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--mem-fraction-static=0.3",  # of what is free, which the other engines' starts change
    "--max-running-requests=16",
    "--skip-tokenizer-init",
    "--dtype=float32",  # bfloat16 rounds differently with what else is in the batch
    "--log-level=info",
    "--sleep-on-idle",  # an idle engine polls with all of a core by itself
)
MODELS = {"llama", "deepseek_v2", "registry", "__init__"}
LIST_MODELS = """
import importlib.util, pathlib
(home,) = importlib.util.find_spec("sglang").submodule_search_locations
print(*(file.stem for file in pathlib.Path(home, "srt", "models").glob("*.py")))
"""


@cache
def other_models(python: str) -> list[str]:
    """Every model of SGLang's that no test serves: to import them is most of an engine's start."""
    listed = subprocess.run([python, "-c", LIST_MODELS], stdout=subprocess.PIPE, text=True, check=True)
    return sorted(set(listed.stdout.split()) - MODELS)


@dataclass(frozen=True)
class Served:
    """What a server is to run. `role`: "prefill", "decode", or "" for an engine of its own."""

    model: Path
    role: str = ""
    worker_socket: str = ""
    page_tokens: int = 1
    max_tokens: int = 8192
    flags: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)


class Engine(ServerGroup):
    """One SGLang server. `start` returns at once; `wait` returns when it answers."""

    def __init__(self, name: str, python: str, served: Served, directory: Path) -> None:
        super().__init__(name, directory / f"{name}.log")
        self.served = served
        self._python = python
        self.port, self.bootstrap_port = 0, 0
        self.start()

    def start(self) -> None:
        """Start it; again on the ports that it had, as a supervisor does."""
        served = self.served
        port = self.port or self.new_port()
        command = [self._python, "-m", "sglang.launch_server", f"--model-path={served.model}"]
        command += [f"--host={HOST}", f"--port={port}", f"--page-size={served.page_tokens}"]
        command += [f"--max-total-tokens={served.max_tokens}", *FLAGS, *served.flags]
        if served.role:
            self.bootstrap_port = self.bootstrap_port or free_port()
            command += [f"--disaggregation-mode={served.role}", "--disaggregation-transfer-backend=kvxferd"]
            command += [f"--disaggregation-bootstrap-port={self.bootstrap_port}"]
        if served.role == "decode":  # the default pins host memory by CUDA
            command.append("--disaggregation-decode-retraction-backup=cpu_tensor")
        others = {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(other_models(self._python))}
        environ = (
            ENVIRONMENT | others | {"KVXFERD_SGLANG_SOCKET": served.worker_socket} | dict(served.environ)
        )
        if not served.worker_socket:
            del environ["KVXFERD_SGLANG_SOCKET"]
        self.start_group(command, environ)

    def wait(self) -> Engine:
        """Return once it serves."""
        wait_until(lambda: self.answers, lambda: f"{self.name} serves: {self.tail()}", START_S)
        return self


def generate(url: str, prompt: Sequence[int], max_tokens: int = 12, **fields: Any) -> dict[str, Any]:
    """Send a request; return SGLang's reply. Raises OSError (HTTPError) where the status is not 200."""
    sampling = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    content = {"input_ids": list(prompt), "sampling_params": sampling, **fields}
    return dict(json.loads(_post(f"{url}/generate", content)))


def abort(url: str, rid: str) -> None:
    """Have an engine abort a request, which may have ended."""
    _post(f"{url}/abort_request", {"rid": rid})


def _post(url: str, content: object) -> bytes:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(content).encode(), headers)
    with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
        return bytes(response.read())


def tokens_of(reply: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens of a reply. Raises AssertionError where the request was aborted."""
    reason = reply["meta_info"]["finish_reason"]
    assert reason["type"] != "abort", reason
    return tuple(reply["output_ids"])


class Pair:
    """A prefill and a decode engine, and what a router sends them."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.prefill, self.decode = prefill, decode
        self._pool = ThreadPoolExecutor(64)
        self._rooms = int.from_bytes(os.urandom(7), "big")

    def new_room(self) -> int:
        """A room that no other request has."""
        self._rooms += 1
        return self._rooms

    def send(
        self, prompt: Sequence[int], max_tokens: int = 12, **fields: Any
    ) -> tuple[Future[dict[str, Any]], Future[dict[str, Any]]]:
        """Send both halves of a request, as SGLang's routers do; return the replies to come."""
        room = {
            "bootstrap_host": HOST,
            "bootstrap_port": self.prefill.bootstrap_port,
            "bootstrap_room": fields.pop("room", None) or self.new_room(),
        }
        halves = (self.prefill.url, self.decode.url)
        first, second = (
            self._pool.submit(generate, url, prompt, max_tokens, **room, **fields) for url in halves
        )
        return first, second

    def tokens(self, prompt: Sequence[int], max_tokens: int = 12, **fields: Any) -> tuple[int, ...]:
        """Send a request and return the decode engine's tokens."""
        first, second = self.send(prompt, max_tokens, **fields)
        first.result(180)
        return tokens_of(second.result(180))

    def close(self) -> None:
        """Wait for no reply any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
