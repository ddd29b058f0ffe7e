"""The engines that most tests share, and that all of their pages are back."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from typing import Any

from tests.support.nodes.waiting import wait_until
from tests.support.sglang_servers.engines import Engine, Pair, Served, generate, tokens_of
from tests.support.vllm_servers.site import Nodes, Site

SETTLE_S = 60.0
PAGE_TOKENS = 16
CHUNKS = ("--chunked-prefill-size=128",)


class Llama:
    """Keys and values: an engine alone, one that prefills in chunks of 128 tokens, and one that decodes."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.model = site.model("llama")
        self.nodes = Nodes(site.daemon("node-p"), site.daemon("node-d"))
        self.alone = site.engine("llama-alone", Served(self.model, page_tokens=PAGE_TOKENS))
        self.prefill = self.start("prefill", flags=CHUNKS)
        self.decode = self.start("decode")
        self.pair = Pair(self.prefill, self.decode)
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def start(self, role: str, name: str = "", **served: Any) -> Engine:
        """Start another engine of the model at its role's daemon; the caller waits for it."""
        node = self.nodes.prefill if role == "prefill" else self.nodes.decode
        given = {"page_tokens": PAGE_TOKENS, **served}
        return self.site.engine(
            f"llama-{name or role}", Served(self.model, role, node.worker_socket, **given)
        )

    def right_tokens(self, prompt: Sequence[int], max_tokens: int = 12) -> tuple[int, ...]:
        """What the engine alone says."""
        key = (max_tokens, *prompt)
        if key not in self._known:
            self._known[key] = tokens_of(generate(self.alone.url, prompt, max_tokens))
        return self._known[key]

    def heal(self) -> None:
        """Have everything run, whatever a test did to it."""
        self.nodes.heal()
        engines = (self.alone, self.prefill, self.decode)
        for engine in engines:
            if not engine.runs:
                engine.start()
        for engine in engines:
            engine.wait()

    def settle(self, *more: Engine) -> None:
        """Return once no page is used and no request waits, on any engine and at either daemon."""
        for engine in (self.prefill, self.decode, *more):
            wait_until(
                lambda engine=engine: not in_use(engine), lambda engine=engine: f"{in_use(engine)}", SETTLE_S
            )
            assert not engine.said("memory leak"), engine.tail()
        wait_until(self.nodes.is_settled, self.nodes.what_moves, SETTLE_S)

    def close(self) -> None:
        """Wait for no reply any more."""
        self.pair.close()


def in_use(engine: Engine) -> dict[str, int]:
    """Return the pages and queues of an engine that are not empty. What its prefix cache keeps is free."""
    with urllib.request.urlopen(f"{engine.url}/v1/loads", timeout=10) as response:
        (load,) = json.loads(response.read())["loads"]
    counted = {"used tokens": load["num_used_tokens"], "running": load["num_running_reqs"]}
    counted |= {key: value for key, value in load["disaggregation"].items() if key.endswith("_reqs")}
    return {key: value for key, value in counted.items() if value}
