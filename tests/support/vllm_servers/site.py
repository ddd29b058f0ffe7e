"""Daemons, engines and models of one test run: started once, shared by its tests, gone at its end."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.waiting import wait_until
from tests.support.server_group import ServerGroup
from tests.support.vllm_servers.completions import ASK_FOR_PREFILL, Completion, complete
from tests.support.vllm_servers.engines import Engine, Served, kvxferd_connector

# Long enough for a test to go on from a published request on a busy machine, short enough to wait for.
LEASE_S = 8.0
SETTLE_S = 40.0


class Site:
    """What is shared. `stop` ends it all and checks that it is gone."""

    def __init__(
        self,
        directory: Path,
        python: str,
        make_engine: Callable[..., Any] = Engine,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`make_engine`: an engine's class; `environ`: what its interpreter needs."""
        self.directory = directory
        self.python = python
        self._make_engine = make_engine
        self._environ = environ or {}
        self.fleet = Fleet(directory)
        self.engines: list[Any] = []
        self.daemons: list[Daemon] = []
        directory.mkdir(parents=True, exist_ok=True)

    def model(self, kind: str) -> Path:
        """The checkpoint of one of the tiny models; made at the first call."""
        path = self.directory / f"model-{kind}"
        if not (path / "config.json").exists():
            script = Path(__file__).parent / "tiny_models.py"
            environ = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **self._environ}
            command = [self.python, str(script), kind, str(path)]
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"cannot build the {kind} model: {done.stderr[-2000:]}"
        return path

    def daemon(self, name: str) -> Daemon:
        """A daemon that is ready, its directory below this one's."""
        self.daemons.append(self.fleet.daemon(name))
        return self.daemons[-1]

    def engine(self, name: str, served: Any) -> Any:
        """Start an engine; the caller waits for it, after starting others."""
        engine = self._make_engine(name, self.python, served, self.directory)
        self.engines.append(engine)
        return engine

    def end(self, *engines: ServerGroup) -> None:
        """End engines that no later test needs: memory and processors are few."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(ServerGroup.stop, engines))
        self.engines = [engine for engine in self.engines if engine not in engines]

    def stop(self) -> None:
        """End everything."""
        self.end(*self.engines)
        self.fleet.stop()


@dataclass
class Nodes:
    """The prefill node's and the decode node's daemon."""

    prefill: Daemon
    decode: Daemon

    def heal(self) -> None:
        """Have both run and ready, whatever a test did to them."""
        for node in (self.prefill, self.decode):
            if node.exit_code is not None:
                node.start()
        for node in (self.prefill, self.decode):
            wait_until(lambda node=node: node.is_ready, f"{node.directory.name} ready", SETTLE_S)

    def producer(self, model: Path, **served: Any) -> Served:
        """A prefill engine at its daemon."""
        connector = kvxferd_connector(self.prefill.worker_socket, "kv_producer", lease_s=LEASE_S)
        return Served(model, connector, **served)

    def consumer(self, model: Path, policy: str = "recompute", **served: Any) -> Served:
        """A decode engine at its daemon."""
        connector = kvxferd_connector(self.decode.worker_socket, "kv_consumer", policy)
        return Served(model, connector, **served)

    def transfers(self) -> dict[str, Any]:
        """What both say of transfers and pulls that have not ended."""
        return {n.directory.name: n.control.get("/v1/transfers") for n in (self.prefill, self.decode)}

    def what_moves(self) -> str:
        """The same in words, with what the decode node's daemon has logged last."""
        return f"{json.dumps(self.transfers())}; {self.decode.log.read_text()[-1500:]}"

    def is_settled(self) -> bool:
        """Whether nothing is published or pulled at either."""
        return not any(one["transfers"] or one["pulls"] for one in self.transfers().values())

    def num_pulls(self) -> int:
        """Pulls at the decode node that have not ended."""
        return len(self.decode.control.get("/v1/transfers")["pulls"])

    def num_published(self) -> int:
        """Transfers at the prefill node that are not released."""
        return len(self.prefill.control.get("/v1/transfers")["transfers"])


def through(
    prefill_engine: Engine, decode_engine: Engine, prompt: Sequence[int], max_tokens: int = 12
) -> Completion:
    """One request as a router sends it, with whatever the prefill engine named, nothing included."""
    reply = complete(prefill_engine.url, prompt, 1, kv_transfer_params=dict(ASK_FOR_PREFILL))
    return complete(decode_engine.url, prompt, max_tokens, kv_transfer_params=reply.kv_transfer_params)


def num_external_tokens(engine: Engine) -> int:
    """Prompt tokens that the engine did not compute but received, since its start."""
    return int(engine.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer"))


def check_moved(
    source: Engine, sink: Engine, prompt: list[int], right_tokens: Callable[[list[int]], Any]
) -> None:
    """Send a request through both: its cache is moved, and its tokens are right.

    The last token of a prompt is always computed where its answer is sampled.
    """
    before = num_external_tokens(sink)
    moved = through(source, sink, prompt).tokens
    assert num_external_tokens(sink) - before in (len(prompt), len(prompt) - 1)
    assert moved == right_tokens(prompt)


def blocks_in_use(engine: Engine) -> float:
    """The share of its blocks that are not free.

    The gauge moves with a step, so a request of one token is sent first.
    """
    complete(engine.url, [3], 1)
    return engine.metric("vllm:kv_cache_usage_perc")


def wait_until_settled(nodes: Nodes, *engines: Engine) -> None:
    """Return once nothing is published or pulled, and every block of the engines is free again."""

    def is_settled() -> bool:
        return nodes.is_settled() and all(blocks_in_use(engine) == 0 for engine in engines)

    def what() -> str:
        used = {engine.name: blocks_in_use(engine) for engine in engines}
        return f"all blocks free and no transfer left; used {used}; {json.dumps(nodes.transfers())}"

    wait_until(is_settled, what, SETTLE_S)


class Llama:
    """The engines that most tests share: one alone, one that prefills, two that decode.

    `decode` computes again what it cannot load, `strict` fails the request.
    """

    def __init__(self, site: Site, nodes: Nodes) -> None:
        model = site.model("llama")
        self.nodes = nodes
        self.alone = site.engine("alone", Served(model))
        self.prefill = site.engine("prefill", nodes.producer(model))
        self.decode = site.engine("decode", nodes.consumer(model, "recompute"))
        self.strict = site.engine("strict", nodes.consumer(model, "fail"))
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    @property
    def all(self) -> tuple[Engine, ...]:
        return (self.alone, self.prefill, self.decode, self.strict)

    def right_tokens(self, prompt: Sequence[int], max_tokens: int = 12) -> tuple[int, ...]:
        """What the engine without a connector says."""
        key = (max_tokens, *prompt)
        if key not in self._known:
            self._known[key] = self.alone.tokens(prompt, max_tokens)
        return self._known[key]

    def settle(self) -> None:
        """Wait until nothing is published or pulled and all blocks are free."""
        wait_until_settled(self.nodes, self.prefill, self.decode, self.strict)

    def heal(self) -> None:
        """Have everything run, whatever a test did to it."""
        self.nodes.heal()
        dead = [engine for engine in self.all if not engine.lives]
        for engine in dead:
            engine.kill()
            engine.start()
        for engine in self.all:
            engine.wait()
