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
    made += [good | {"ready_tokens": n} for n in (2**63, 2**64, -(2**63) - 1, 2**4000, -2, 1.5, "1", None)]
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
    good = scene.honest("publish", source=0)["ref"]
    several = random.Random(scene.seed).sample(list(enumerate(_bad(good))), NUM_TRIED)
    for number, bad in several:
        form = FORMS[number % len(FORMS)]
        if form == "struct" and not (
            isinstance(bad, dict) and set(bad) <= {*NAMES, "ready_tokens"} and len(bad) > 4
        ):
            form = "dict"
        for do, more in (
            ("pull", {"deadline_s": 0.3}),
            ("hint", {"what": "prepare"}),
            ("hint", {"what": "abandon"}),
        ):
            if do == "hint" and number % 3:
                continue
            came = scene.ask("honest", do=do, sink=1, ref=bad, form=form, limit_s=8.0, **more)
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
    good = scene.honest("publish", source=0)["ref"]
    for number in range(4):
        ref = good | {"endpoint": f"tcp://host-{number}.example.invalid:9441{key}"}
        scene.honest("hint", sink=1, ref=ref, what="prepare")
    before = scene.ask("traffic")["done"]
    scene.rest(6.0)
    done = scene.ask("traffic")["done"] - before
    # A hundred would be usual; a busy machine has its share.
    return f"{done} pulls in 6 s while names are looked up" if done < 10 else ""


@attack("worker")
def pulls_from_nowhere(scene: Scene) -> str:
    """A rank pulls from a thousand transfers of a daemon that is not there."""
    session = scene.worker(scene.b)
    session.register("lost")
    ref = reference("tcp://127.0.0.1:9", scene)
    for ticket in range(1000):
        pull = worker.Pull(
            ticket=ticket, ref=ref, num_tokens=16, deadline_s=3.0, blocks={"full": PackedBlocks(ids=bytes(4))}
        )
        session.say(pull)
    scene.rest(3.5)
    return ""


@attack("worker", limit_s=60.0)
def notices_of_everything(scene: Scene) -> str:
    """A rank with a thousand pulls names a hundred thousand tickets as noticed, again and again."""
    session = scene.worker(scene.b)
    session.register("notices")
    ref = reference("tcp://127.0.0.1:9", scene)
    for ticket in range(1000):
        session.say(
            worker.Pull(
                ticket=ticket,
                ref=ref,
                num_tokens=16,
                deadline_s=30.0,
                blocks={"full": PackedBlocks(ids=bytes(4))},
            )
        )
    for _ in range(5):
        session.say(worker.DeliveredByMover(tickets=tuple(range(10_000, 110_000))))
    session.say(worker.DeliveredByMover(tickets=tuple(range(1000))))
    scene.rest(1.0)
    return ""


@attack("worker")
def odd_numbers_from_a_worker(scene: Scene) -> str:
    """Seconds that are no numbers, tickets that repeat, slots that are not there, blocks past the end."""
    nan, inf = float("nan"), float("inf")
    good = reference("tcp://127.0.0.1:9", scene)
    blocks = {"full": PackedBlocks(ids=bytes(4))}
    messages = [
        *(
            worker.Pull(ticket=1, ref=good, num_tokens=16, deadline_s=s, blocks=blocks)
            for s in (nan, inf, -inf, -1.0, 1e300, 0.0)
        ),
        *(
            worker.Pull(ticket=2, ref=good, num_tokens=n, deadline_s=1.0, blocks=blocks)
            for n in (0, -1, 2**62, 17)
        ),
        *(
            worker.Publish(
                transfer_id="x",
                nonce="0" * 32,
                num_tokens=16,
                fence_slot=slot,
                incarnations=(),
                blocks=blocks,
                lease_s=lease,
            )
            for slot in (-1, 4096, 2**40)
            for lease in (nan, inf, -1.0, 1e300, 0.0)
        ),
        *(
            worker.Publish(
                transfer_id=name,
                nonce=nonce,
                num_tokens=16,
                fence_slot=0,
                incarnations=(),
                blocks={group: packed},
            )
            for name in ("", "n" * 5000)
            for nonce in ("", "n" * 5000)
            for group in ("full", "g" * 5000)
            for packed in (PackedBlocks(ids=b"abc"), PackedBlocks(ids=bytes(4), first_token=-5))
        ),
        worker.Publish(
            transfer_id="y",
            nonce="0" * 32,
            num_tokens=16,
            fence_slot=0,
            incarnations=(),
            blocks=blocks,
            num_readers=-(2**60),
        ),
        worker.Resume(request=1, regions=(), incarnation=""),
        worker.Suspend(),
        worker.Suspend(),
        worker.NewMover(),
        worker.Unpublish(transfer_id=""),
        worker.Ready(transfer_id="q" * 100_000, incarnation="i"),
    ]
    session = scene.worker()
    session.register("odd")
    for message in messages:
        try:
            session.say(message)
        except OSError:
            session = scene.worker()
            session.register("odd")
        while session.next(0.02) is not None:
            pass
        if session.ended:
            session = scene.worker()
            session.register("odd")
    return ""
