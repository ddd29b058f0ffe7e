"""Real vLLM servers: started in process groups of their own, watched, killed, and gone afterwards.

They run on all cores but one (`processors`), unless `Served` has it otherwise.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.nodes.waiting import wait_until
from tests.support.ports import free_port
from tests.support.server_group import HOST, ServerGroup
from tests.support.vllm_servers.completions import complete
from tests.support.vllm_servers.processors import engine_processors

START_S = 300.0  # four engines load their imports on one core, beside whatever else runs there

# Two cores for everything: one thread for each worker, no binding, no telemetry, no network.
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
WARM_UP = [3 + token for token in range(16)]  # less than a block: nothing of it is cached
# bfloat16 rounds differently with what else is in the batch and in the cache, so that one engine alone
# gives different tokens at different times. Tests compare tokens.
FLAGS = (
    "--skip-tokenizer-init",
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=2048",
    "--served-model-name=tiny",
    "--enable-server-load-tracking",
)


@dataclass(frozen=True)
class Served:
    """What a server is to run: `connector` is vLLM's --kv-transfer-config, None for an engine of its own."""

    model: Path
    connector: Mapping[str, Any] | None = None
    block_tokens: int = 32
    num_blocks: int = 512
    flags: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    on_all_cores: bool = False  # else one core is kept for daemons and movers


def kvxferd_connector(socket_path: str, role: str, policy: str = "", **extra: Any) -> dict[str, Any]:
    """The --kv-transfer-config of an engine that moves its cache through the daemon at `socket_path`."""
    config = {
        "kv_connector": "KvxferdConnector",
        "kv_connector_module_path": "kvxferd.integrations.vllm",
        "kv_role": role,
        "kv_connector_extra_config": {"socket": socket_path, **extra},
    }
    return config | ({"kv_load_failure_policy": policy} if policy else {})


def nixl_connector(role: str, policy: str = "") -> dict[str, Any]:
    """The same for the connector inside vLLM, its defaults kept."""
    config: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    return config | ({"kv_load_failure_policy": policy} if policy else {})


class Engine(ServerGroup):
    """One vLLM server. `start` returns at once; `wait` returns when it answers."""

    def __init__(self, name: str, python: str, served: Served, directory: Path) -> None:
        super().__init__(name, directory / f"{name}.log")
        self.served = served
        self._python = python
        self.start()

    def start(self) -> None:
        """Start it on a new port."""
        served = self.served
        command = [self._python, "-m", "vllm.entrypoints.openai.api_server", f"--model={served.model}"]
        command += [f"--host={HOST}", f"--port={self.new_port()}", f"--block-size={served.block_tokens}"]
        command += [f"--num-gpu-blocks-override={served.num_blocks}", *FLAGS, *served.flags]
        if served.connector is not None:
            command.append(f"--kv-transfer-config={json.dumps(served.connector)}")
        environ = ENVIRONMENT | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())} | dict(served.environ)
        self.start_group(command, environ, nullcontext() if served.on_all_cores else engine_processors())

    def wait(self, *, warm_up: bool = True) -> Engine:
        """Return once it serves. Without `warm_up` the caller's first request is the engine's first.

        On a processor with AMX the CPU build of vLLM 0.32 dies of SIGILL, in its own attention and without a
        connector too, where its first request computes one token. After one of five tokens it does not.
        """
        wait_until(lambda: self.answers, lambda: f"{self.name} serves: {self.tail()}", START_S)
        if warm_up:
            complete(self.url, WARM_UP, max_tokens=1)
        self.ready_after_s = time.monotonic() - self.started_at
        return self

    def workers(self) -> list[int]:
        """The processes that hold the model and its cache."""
        return [pid for pid in self.group() if "Worker" in _command_of(pid)]

    def num_unanswered(self) -> int:
        """Requests that the server has and has not answered."""
        with urllib.request.urlopen(f"{self.url}/load", timeout=10) as response:
            return int(json.loads(response.read())["server_load"])

    def await_unanswered(self, num_requests: int) -> None:
        """Return once the server has so many requests that it has not answered."""
        wait_until(lambda: self.num_unanswered() == num_requests, f"{self.name} has {num_requests} requests")

    def tokens(self, prompt: Sequence[int], max_tokens: int = 12) -> tuple[int, ...]:
        """Return what it says when nobody has it prefill or read a cache."""
        return complete(self.url, prompt, max_tokens).tokens


def _command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""
