"""References as a hostile router might write them. The honest pair is given them."""

from __future__ import annotations

import random
from typing import Any

from kvxferd.layout import PackedBlocks
from kvxferd.wire import worker
from tests.proofs.hostile.attacker import Scene
from tests.proofs.hostile.attacks.floods import reference
from tests.proofs.hostile.registry import Setup, attack

NUM_TRIED = 60  # of twice as many, others with each seed
SURROGATE = "\ud800"
FORMS = ("dict", "text", "bytes", "struct")
NAMES = ("endpoint", "engine_id", "generation", "transfer_id", "nonce")


def _bad(good: dict[str, Any]) -> list[Any]:
    odd: list[Any] = [
        SURROGATE,
        "x" + SURROGATE,
        "",
        "\0",
        "a\nb",
        "x" * 600,
        "x" * 5_000_000,
        1,
        None,
        [],
        {},
    ]
    made: list[Any] = [good | {name: value} for name in NAMES for value in odd]
    endpoints = (
        "tcp://*:9441",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:99999",
        "ipc:///tmp/x",
        "inproc://zeromq.zap.01",
        "tcp://127.0.0.1:1;127.0.0.1:2",
        "tcp://[::1]:1",
        "tcp://[",
        "pgm://lo;1:2",
        "tcp://%65:1",
        "tcp://" + "a" * 300 + ":1",
    )
    key = good["endpoint"].partition("#")[2]
    made += [good | {"endpoint": f"{endpoint}#{key}"} for endpoint in endpoints]
    made += [good | {"endpoint": good["endpoint"] + more} for more in ("#", "#" + key, "0", " ", SURROGATE)]
    made += [
        {},
        [],
        "",
        "{}",
        None,
        7,
        {"endpoint": good["endpoint"]},
        good | {"later": 1},
        good | {"x": "y" * 5_000_000},
    ]
    return made


@attack("router", limit_s=90.0)
def references_of_nonsense(scene: Scene) -> str:
    """Numbers past 64 bits, lone surrogates, wrong types, odd endpoints, in every form of them."""
    good = scene.honest_ref()
    several = random.Random(scene.seed).sample(list(enumerate(_bad(good))), NUM_TRIED)
    for number, bad in several:
        form = FORMS[number % len(FORMS)]
        if form == "struct" and not (
            isinstance(bad, dict) and set(bad) <= {*NAMES, "traceparent"} and len(bad) > 4
        ):
            form = "dict"
        for do, more in (
            ("pull", {"deadline_s": 0.3}),
            ("hint", {"what": "prepare"}),
            ("hint", {"what": "abandon"}),
        ):
            if do == "hint" and number % 3:
                continue
            came = scene.send_request("honest", do=do, sink=1, ref=bad, form=form, limit_s=8.0, **more)
            text = repr(bad)[:120]
            if came["outcome"] == "delivered" and not _means(bad, good):
                return f"{text} was delivered"
            if came["outcome"] == "no answer":
                return f"{do} of {text} as {form} never ended"
            if came["outcome"] == "raised" and not came["code"]:
                return f"{do} of {text} as {form} raised {came.get('why', '')[:200]}"
    return ""


def _means(bad: Any, good: dict[str, Any]) -> bool:
    """Whether it leads to the same transfer, with something beside it that need not be understood."""
    return isinstance(bad, dict) and all(bad.get(name) == good[name] for name in NAMES)


MUTE = Setup(mute_resolver=True)


@attack("router", setup=MUTE, limit_s=60.0)
def names_that_never_resolve(scene: Scene) -> str:
    """References whose host is a name, where the name server never answers; others' pulls go on."""
    key = f"#{scene.key.public}" if scene.key else ""
    good = scene.honest_ref()
    for number in range(4):
        ref = good | {"endpoint": f"tcp://host-{number}.example.invalid:9441{key}"}
        scene.honest("hint", sink=1, ref=ref, what="prepare")
    before = scene.send_request("traffic")["done"]
    scene.rest(6.0)
    done = scene.send_request("traffic")["done"] - before
    # A hundred would be usual; a busy machine has its share.
    return f"{done} pulls in 6 s while names are looked up" if done < 10 else ""


@attack("worker")
def pulls_from_nowhere(scene: Scene) -> str:
    """A rank pulls from a thousand transfers of a daemon that is not there."""
    session = scene.worker(scene.b)
    session.register("lost")
    ref = reference("tcp://127.0.0.1:9", scene)
    for ticket in range(1000):
        pull = worker.PullRequest(
            ticket=ticket, ref=ref, num_tokens=16, deadline_s=3.0, blocks={"full": PackedBlocks(ids=bytes(4))}
        )
        session.say(pull)
    scene.rest(3.5)
    return ""
