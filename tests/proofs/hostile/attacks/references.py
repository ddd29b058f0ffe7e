"""References as a hostile router might write them. An honest engine is given them."""

from __future__ import annotations

import json
import random
from typing import Any

from kvxferd.errors import Code
from kvxferd.layout import PackedBlocks
from kvxferd.tooling.child_process import ChildError
from kvxferd.wire import worker
from kvxferd.wire.common import TransferRef
from tests.proofs.hostile.attack import Scene, attack
from tests.proofs.hostile.attacks.floods import reference
from tests.support.nodes.requests import publish

NUM_TRIED = 60  # of twice as many, others with each seed
SURROGATE = "\ud800"
FORMS = ("dict", "text", "bytes", "struct")
NAMES = ("endpoint", "engine_id", "generation", "transfer_id", "nonce")


def _bad(good: dict[str, Any]) -> list[Any]:
    texts = (SURROGATE, "x" + SURROGATE, "", "\0", "a\nb", "x" * 600, "x" * 5_000_000)
    odd: list[Any] = [*texts, 1, None, [], {}]
    made: list[Any] = [good | {name: value} for name in NAMES for value in odd]
    endpoints = (
        *("tcp://*:9441", "tcp://127.0.0.1:0", "tcp://127.0.0.1:99999", "tcp://127.0.0.1:1;127.0.0.1:2"),
        *("tcp://[::1]:1", "tcp://[", "tcp://%65:1", f"tcp://{'a' * 300}:1"),
        *("ipc:///tmp/x", "inproc://zeromq.zap.01", "pgm://lo;1:2"),
    )
    key = good["endpoint"].partition("#")[2]
    made += [good | {"endpoint": f"{endpoint}#{key}"} for endpoint in endpoints]
    made += [good | {"endpoint": good["endpoint"] + more} for more in ("#", "#" + key, "0", " ", SURROGATE)]
    made += [{}, [], "", "{}", None, 7, {"endpoint": good["endpoint"]}]
    return [*made, good | {"later": 1}, good | {"x": "y" * 5_000_000}]


@attack("router", limit_s=90.0)
def references_of_nonsense(scene: Scene) -> str:
    """Numbers past 64 bits, lone surrogates, wrong types, odd endpoints, in every form of them."""
    good = publish([scene.source], 1)
    several = random.Random(scene.seed).sample(list(enumerate(_bad(good))), NUM_TRIED)
    for number, bad in several:
        form = FORMS[number % len(FORMS)]
        if form == "struct" and not (
            isinstance(bad, dict) and set(bad) <= {*NAMES, "traceparent"} and len(bad) > 4
        ):
            form = "dict"
        formed, text = _formed(bad, form), f"{repr(bad)[:120]} as {form}"
        outcome, why = scene.pull(formed, 0.3, 8.0)
        if outcome == "delivered" and not _means(bad, good):
            return f"{text} was delivered"
        if outcome in ("hung", "broken"):
            return f"the pull of {text} is {outcome}: {why[:200]}"
        for hint in (scene.reader.prepare, scene.reader.abandon) if number % 3 == 0 else ():
            try:
                hint(formed)
            except ChildError as error:
                if error.code is Code.INTERNAL:
                    return f"a hint of {text} raised {error.message[:200]}"
    return ""


def _formed(ref: Any, form: str) -> Any:
    """As a dict, as JSON in text or bytes, or as the struct itself with nothing checked."""
    if form == "struct":
        return TransferRef(**ref)
    text = json.dumps(ref)
    return {"dict": ref, "text": text, "bytes": text.encode()}[form]


def _means(bad: Any, good: dict[str, Any]) -> bool:
    """Whether it leads to the same transfer, with something beside it that need not be understood."""
    return isinstance(bad, dict) and all(bad.get(name) == good[name] for name in NAMES)


@attack("worker")
def pulls_from_nowhere(scene: Scene) -> str:
    """A rank pulls from a thousand transfers of a daemon that is not there."""
    session = scene.worker(scene.b)
    session.be_rank("lost")
    ref = reference("tcp://127.0.0.1:9", scene)
    for ticket in range(1000):
        pull = worker.PullRequest(
            ticket=ticket, ref=ref, num_tokens=16, deadline_s=3.0, blocks={"full": PackedBlocks(ids=bytes(4))}
        )
        session.say(pull)
    scene.rest(3.5)
    return ""
