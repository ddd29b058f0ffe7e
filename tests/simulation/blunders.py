"""Wrong calls of engines at rest: each is refused with its code, and harms nobody."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from kvxferd import client
from kvxferd.client import BlockList
from kvxferd.errors import Code, KvxferdError
from tests.simulation.checks import Check, Violation
from tests.simulation.contents import Lists
from tests.simulation.engine import Transfer, Worker
from tests.simulation.shapes import draw_request, own_lists

if TYPE_CHECKING:
    from tests.simulation.aftermath import Wait
    from tests.simulation.world import World

ANSWER_S = 12.0
NUM_CALLS = 6  # of an episode
NUM_TOKENS = 5


class Call(NamedTuple):
    """What is right of a pull or publish, before something of it is made wrong."""

    ref: client.TransferRef
    lists: Lists
    num_tokens: int = NUM_TOKENS
    seconds: float = 10.0  # its deadline, or its lease


def _with_ref(**changed: str) -> Callable[[Call], Call]:
    return lambda call: call._replace(ref=replace(call.ref, **changed))


def _with_ids(change: Callable[[list[int]], list[int]]) -> Callable[[Call], Call | None]:
    """Change the block ids of the first group that has tokens, if one has: of a state the last counts."""

    def act(call: Call) -> Call | None:
        for name, listed in call.lists.items():
            if listed.state_at < 0:
                ids = change([*listed.ids])
                return call._replace(lists={**call.lists, name: dataclasses.replace(listed, ids=ids)})
        return None

    return act


Wrong = dict[str, tuple[Code, Callable[[Call], Call | None]]]
OF_BOTH: Wrong = {
    "a block twice": (Code.BLOCKS_INVALID, _with_ids(lambda ids: [*ids, ids[0]])),
    "a block that there is not": (Code.BLOCKS_INVALID, _with_ids(lambda ids: [*ids[:-1], 1 << 20])),
    "a group that there is not": (
        Code.BLOCKS_INVALID, lambda call: call._replace(lists={**call.lists, "none": BlockList(ids=[0])}),
    ),
    "no tokens": (Code.BLOCKS_INVALID, lambda call: call._replace(num_tokens=0)),
    "a time of years": (Code.BAD_REQUEST, lambda call: call._replace(seconds=1e8)),
}  # fmt: skip
OF_PULLS: Wrong = {
    "another nonce": (Code.NONCE_WRONG, _with_ref(nonce="0" * 32)),
    "an engine that there is not": (Code.ENGINE_UNKNOWN, _with_ref(engine_id="nobody")),
    "another generation": (Code.GENERATION_STALE, _with_ref(generation="g0")),
    "a transfer that never was": (Code.TRANSFER_UNKNOWN, _with_ref(transfer_id="never")),
    "an endpoint that is none": (Code.ENDPOINT_INVALID, _with_ref(endpoint="tcp://10.0.0.1:0")),
}


class Blunders:
    """Makes wrong calls. `wait` lets the world go on until something is true, or so long."""

    def __init__(self, world: World, rng: random.Random, wait: Wait) -> None:
        self._world, self._rng, self._wait = world, rng, wait

    def check(self) -> None:
        """Some wrong calls of a source and of a sink are refused; its process goes on."""
        rng, source, sink = (
            self._rng,
            self._rng.choice(self._world.sources),
            self._rng.choice(self._world.sinks),
        )
        if (transfer := source.publish(2)) is None:
            return
        transfer.lease_s = NUM_CALLS * ANSWER_S
        self._wait(lambda: transfer.ref is not None, ANSWER_S)
        for _ in range(NUM_CALLS):
            if rng.random() < 0.3:
                self._check(source.publisher, transfer, "publish", OF_BOTH)
            else:
                self._check(rng.choice(sink.ranks), transfer, "pull", OF_BOTH | OF_PULLS)
        transfer.publisher.do(lambda: transfer.publisher.unpublish(transfer))
        self._wait(lambda: bool(transfer.released), ANSWER_S)  # what follows needs its blocks

    def _check(self, worker: Worker, transfer: Transfer, what: str, wrong: Wrong) -> None:
        name = self._rng.choice(sorted(wrong))
        code, change = wrong[name]
        deployment = worker.engine.shape.deployment
        lists = draw_request(self._rng, deployment, NUM_TOKENS, list(range(deployment.num_blocks)))
        assert transfer.ref is not None
        if lists is None:
            return
        if what == "pull":
            assert worker.shape is not None
            lists = own_lists(worker.shape.layout, lists)
        if (call := change(Call(transfer.ref, lists))) is None:
            return
        answers: list[object] = []
        self._world.tell("blunder", f"{worker.name} calls {what} with {name}")
        worker.do(partial(self._run, worker, what, call, answers))
        if not self._wait(lambda: bool(answers), ANSWER_S) or answers != [code]:
            raise Violation(Check.REFUSED, f"{worker.name} calls {what} with {name}: {answers}, not {code}")

    def _run(self, worker: Worker, what: str, call: Call, answers: list[object]) -> None:
        handle: Any = worker.handle
        try:
            if what == "pull":
                made = handle.pull(call.ref, call.lists, call.num_tokens, call.seconds).number
            else:
                made = f"wrong{self._world.take_number()}"
                handle.publish(made, call.lists, call.num_tokens, lease_s=call.seconds)
        except KvxferdError as error:
            answers.append(error.code)
        else:
            worker.answers[made] = answers
