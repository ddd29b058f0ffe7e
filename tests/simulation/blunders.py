"""Wrong calls of engines at rest, and calls without room: each is refused with its code, and harms nobody."""

from __future__ import annotations

import dataclasses
import importlib
import random
import select
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from kvxferd import client
from kvxferd.client import BlockList
from kvxferd.core.limits import table as limits
from kvxferd.core.ranks.registration_checks import REGISTER_PER_S
from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import EngineId, Rank
from kvxferd.layout import CacheTensor, EngineSpec, GroupKind, RankLayout
from kvxferd.memory import SealedMemory
from kvxferd.wire import limits as sizes
from kvxferd.wire.common import Message
from tests.simulation import wrong_daemons
from tests.simulation.checks import Check, Violation
from tests.simulation.engine import Engine
from tests.simulation.false_messages import (
    ARRIVES,
    FALSE_MESSAGES,
    TAKEN,
    UNHEARD,
    Between,
    FalseMessage,
)
from tests.simulation.history import End
from tests.simulation.interposed import set_on
from tests.simulation.shapes import draw_request, own_lists
from tests.simulation.store import MemoryKind, Store
from tests.simulation.transfers import LEASE_S, Transfer
from tests.simulation.worker import Worker
from tests.simulation.wrong_daemons import WRONG, WrongMessage
from tests.simulation.wrong_workers import OF_RANKS, OF_STRANGERS, be_stranger

if TYPE_CHECKING:
    from tests.simulation.aftermath import Wait
    from tests.simulation.world import World

ANSWER_S = 12.0
NUM_CALLS = 40  # of an episode
NUM_STRANGERS = 8  # that send something wrong one after another
OWNER_SHARE = 0.3
NUM_WRONG_DAEMONS = 6
NUM_FALSE_MESSAGES = 20
ANEW_S = 0.3  # after which daemons are connected again
UNHEARD_S = 3.0  # the lease of a transfer whose readers' acknowledgements are refused
QUIET_WITHIN_S = 3.0  # in which what was asked has its reply
BACK_S, SETTLED_S = 60.0, 14.0  # of a daemon that was restarted
NUM_TOKENS = 5
TOO_MANY_TOKENS = 17  # no transfer has so many
NUM_FULL = 2
# Limits past which a pull is refused, of the table or of a module.
OF_CLIENTS = ("client.outbox MAX_QUEUED", "client.pulls MAX_LIVE_PULLS")
OF_READERS = dict.fromkeys(
    ("plan_bytes", "remote_engine_bytes", "core.source.grants MAX_GRANTS_PER_TRANSFER", *OF_CLIENTS),
    Code.BUSY,
) | dict.fromkeys(("plan.planner MAX_EXTENTS", "plan.planner MAX_PERIOD_STEPS"), Code.LAYOUT_INCOMPATIBLE)
STRANGER = 4242  # a user that has no engine
# Codes of wrong arguments, as the client's own check has them.
INVALID, BAD = Code.BLOCKS_INVALID, Code.BAD_REQUEST


class Call(NamedTuple):
    """What is right of a pull or publish, before something of it is made wrong."""

    ref: Any
    lists: Any
    num_tokens: Any = NUM_TOKENS
    seconds: Any = 10.0  # its deadline, or its lease
    more: dict[str, Any] = {}  # of other arguments  # noqa: RUF012
    longer: Any = None  # lists of more tokens than any transfer has


Change = Callable[[Call], Call | None]


def _with(**changed: Any) -> Change:
    return lambda call: call._replace(**changed)


def _with_more(**more: Any) -> Change:
    return lambda call: call._replace(more=more)


def _with_ref(**changed: str) -> Change:
    return lambda call: call._replace(ref=replace(call.ref, **changed))


def _at_another_host(host: str) -> Change:
    """Change where a transfer is said to be; its daemon's key stays."""
    return lambda call: call._replace(
        ref=replace(call.ref, endpoint=call.ref.endpoint.replace("10.0.0.", host))
    )


def _with_list(change: Callable[[BlockList], Any], is_state: bool = False) -> Change:
    """Change the list of the first group that has tokens, or that has a state, if one has."""

    def act(call: Call) -> Call | None:
        for name, listed in call.lists.items():
            if (listed.state_at >= 0) is is_state:
                return call._replace(lists={**call.lists, name: change(listed)})
        return None

    return act


def _with_ids(change: Callable[[list[int]], list[Any]]) -> Change:
    return _with_list(lambda listed: dataclasses.replace(listed, ids=change([*listed.ids])))


def _without_a_group(call: Call) -> Call:
    return call._replace(lists=dict([*call.lists.items()][1:]))


def _other_block(ids: list[int]) -> int:
    return next(block for block in range(len(ids) + 1) if block not in ids)


Wrong = dict[str, tuple[Code | Callable[[], Code], Change]]
OF_BOTH: Wrong = {
    "a block twice": (INVALID, _with_ids(lambda ids: [*ids[: max(1, len(ids) - 1)], ids[0]])),
    "a block that there is not": (INVALID, _with_ids(lambda ids: [*ids[:-1], 1 << 20])),
    "a block below 0": (INVALID, _with_ids(lambda ids: [*ids[:-1], -1])),
    "a block of no number": (INVALID, _with_ids(lambda ids: [*ids[:-1], 1 << 40])),
    "a block that is a word": (INVALID, _with_ids(lambda ids: [*ids[:-1], "one"])),
    "one block more": (INVALID, _with_ids(lambda ids: [*ids, _other_block(ids)])),
    "a list of no kind": (INVALID, _with_list(lambda listed: [*listed.ids])),
    "a first token below 0": (
        INVALID, _with_list(lambda listed: dataclasses.replace(listed, first_token=-8)),
    ),
    "a first token that is a word": (
        INVALID, _with_list(lambda listed: dataclasses.replace(listed, first_token="one")),
    ),
    "a state of another token": (
        INVALID, _with_list(lambda listed: dataclasses.replace(listed, state_at=1), is_state=True),
    ),
    "lists of no kind": (INVALID, _with(lists=[0])),
    "a group that there is not": (
        INVALID, lambda call: call._replace(lists={**call.lists, "none": BlockList(ids=[0])}),
    ),
    "a group less": (INVALID, _without_a_group),
    "too many groups": (
        INVALID, _with(lists={f"g{number}": BlockList(ids=[]) for number in range(2000)}),
    ),
    "no tokens": (INVALID, _with(num_tokens=0)),
    "tokens of no number": (INVALID, _with(num_tokens="five")),
    "tokens past any number": (INVALID, _with(num_tokens=1 << 70)),
    "a time of years": (BAD, _with(seconds=1e8)),
    "a time of centuries": (BAD, _with(seconds=1e10)),
    "a time that is none": (BAD, _with(seconds="soon")),
    "no time": (BAD, _with(seconds=0.0)),
    "an event that is none": (BAD, _with_more(after=5)),
}  # fmt: skip
OF_PULLS: Wrong = {
    "another nonce": (
        Code.NONCE_WRONG,
        lambda call: call._replace(
            ref=replace(call.ref, nonce="0" * sizes.MAX_NAME_CHARS).to_json().ljust(sizes.MAX_REF_BYTES)
        ),
    ),
    "more tokens than are published": (
        Code.TOKENS_NOT_PUBLISHED,
        lambda call: call.longer and call._replace(lists=call.longer, num_tokens=TOO_MANY_TOKENS),
    ),
    "an engine that there is not": (Code.ENGINE_UNKNOWN, _with_ref(engine_id="nobody")),
    "another generation": (Code.GENERATION_STALE, _with_ref(generation="g0")),
    "a transfer that never was": (Code.TRANSFER_UNKNOWN, _with_ref(transfer_id="never")),
    "an endpoint of no port": (Code.ENDPOINT_INVALID, _with_ref(endpoint="tcp://10.0.0.1:0")),
    "an endpoint of no kind": (Code.ENDPOINT_INVALID, _with_ref(endpoint="ipc://here")),
    "a reference of no kind": (Code.TRANSFER_UNKNOWN, _with(ref=5)),
    "a reference that is cut off": (
        Code.TRANSFER_UNKNOWN, lambda call: call._replace(ref=call.ref.to_json()[:-9]),
    ),
    "a reference that is long": (
        Code.TRANSFER_UNKNOWN,
        lambda call: call._replace(ref=call.ref.to_json().ljust(sizes.MAX_REF_BYTES + 1)),
    ),
    "a reference with a long name": (
        Code.TRANSFER_UNKNOWN, lambda call: call._replace(ref={**call.ref.to_dict(), "nonce": "0" * 300}),
    ),
    "a reference without a nonce": (
        Code.TRANSFER_UNKNOWN, lambda call: call._replace(ref={**call.ref.to_dict(), "nonce": ""}),
    ),
    "a reference of numbers": (
        Code.TRANSFER_UNKNOWN, lambda call: call._replace(ref={**call.ref.to_dict(), "engine_id": 7}),
    ),
}  # fmt: skip
OF_PULLS_WITHOUT_KEYS: Wrong = {
    "a node that there is not": (Code.PEER_UNREACHABLE, _with_ref(endpoint="tcp://nowhere:9441")),
    "an endpoint with a key": (Code.NOT_ALLOWED, _with_ref(endpoint=f"tcp://10.0.0.1:9441#{'7' * 64}")),
}
OF_PULLS_WITH_KEYS: Wrong = {
    "an endpoint without a key": (Code.NOT_ALLOWED, _with_ref(endpoint="tcp://10.0.0.1:9441")),
    "a key that is not admitted": (Code.NOT_ALLOWED, _with_ref(endpoint=f"tcp://10.0.0.1:9441#{'7' * 64}")),
    "an address that is not admitted": (Code.NOT_ALLOWED, _at_another_host("10.0.1.")),
    "a name, where addresses are admitted": (Code.NOT_ALLOWED, _at_another_host("node")),
}  # fmt: skip
OF_PUBLISHES: Wrong = {
    "no id": (INVALID, _with_more(transfer_id="")),
    "an id that is long": (INVALID, _with_more(transfer_id="t" * 300)),
    "an id of no letters": (INVALID, _with_more(transfer_id="\udc80")),
    "no readers": (INVALID, _with_more(num_readers=0)),
    "more written than there is": (INVALID, _with_more(ready_tokens=NUM_TOKENS + 1)),
    "a short nonce": (BAD, _with_more(nonce="short")),
    "an id that is used": (
        Code.TRANSFER_EXISTS, lambda call: call._replace(more={"transfer_id": call.ref.transfer_id}),
    ),
}  # fmt: skip


def _add_with_a_gap(rank: Any, name: str) -> None:
    rank.add_blocks(name, _lists(rank, [1]))
    rank.add_blocks(name, _lists(rank, [2], 1 << 20))


def _lists(rank: Any, ids: list[int], at: int = 0) -> dict[str, BlockList]:
    """Return blocks of a group of the rank that has tokens."""
    groups = [one.name for one in rank.layout.groups if one.kind is GroupKind.ATTENTION]
    return {name: BlockList(ids=ids, first_token=at) for name in groups[:1]}


def _regions_of(rank: Any) -> list[str]:
    return [one.region for one in rank.layout.regions]


def _resume_awake(rank: Any, name: str) -> None:
    with SealedMemory.create(max(one.size_bytes for one in rank.layout.regions)) as memory:
        rank.resume(dict.fromkeys(_regions_of(rank), memory))


# Of a rank with a transfer of that id that grows, of which nothing is written yet.
Growing = Callable[[Any, str], None]
OF_GROWING: dict[str, tuple[Code, Growing]] = {
    "more than all is ready": (INVALID, lambda rank, name: rank.ready(name, NUM_TOKENS + 1)),
    "less than nothing is ready": (INVALID, lambda rank, name: rank.ready(name, -1)),
    "blocks of another transfer": (
        Code.TRANSFER_UNKNOWN, lambda rank, name: rank.add_blocks(f"{name} not", {}),
    ),
    "blocks of no group": (INVALID, lambda rank, name: rank.add_blocks(name, {"none": BlockList(ids=[0])})),
    "blocks that there are not": (
        INVALID, lambda rank, name: rank.add_blocks(name, _lists(rank, [1 << 20])),
    ),
    "blocks that leave some out": (INVALID, _add_with_a_gap),
    "memory that is none": (
        Code.REGION_INVALID, lambda rank, name: rank.resume(dict.fromkeys(_regions_of(rank))),
    ),
    "its memory again": (Code.OUT_OF_PLACE, _resume_awake),
}  # fmt: skip


class Stranger(NamedTuple):
    """What a process offers that wants to be a rank of an engine which has all of its own."""

    spec: EngineSpec
    layout: RankLayout
    regions: Any


def _of_spec(**changed: Any) -> Callable[[Stranger], Stranger]:
    return lambda right: right._replace(spec=replace(right.spec, **changed))


def _of_layout(change: Callable[[Any], dict[str, Any]]) -> Callable[[Stranger], Stranger]:
    return lambda right: right._replace(layout=replace(right.layout, **change(right.layout)))


def _with_sizes(by: int) -> Callable[[Any], dict[str, Any]]:
    def change(layout: Any) -> dict[str, Any]:
        return {"regions": tuple(replace(one, size_bytes=one.size_bytes + by) for one in layout.regions)}

    return change


def _with_small_regions(layout: Any) -> dict[str, Any]:
    return {"regions": tuple(replace(one, size_bytes=1) for one in layout.regions)}


OF_REGISTRATIONS: dict[str, tuple[Code, Callable[[Stranger], Stranger]]] = {
    "a rank that is there": (Code.RANK_TAKEN, lambda right: right),
    "a rank past the last": (Code.RANK_INVALID, _of_spec(tp_rank=100)),
    "a size that is none": (Code.RANK_INVALID, _of_spec(tp_size=0)),
    "a name that is none": (Code.RANK_INVALID, _of_spec(engine_id="")),
    "more layers": (Code.SHAPE_MISMATCH, lambda right: _of_spec(num_layers=right.spec.num_layers + 1)(right)),
    "a region that is missing": (
        Code.REGION_INVALID, lambda right: right._replace(regions=dict([*right.regions.items()][1:])),
    ),
    "a region more": (
        Code.REGION_INVALID,
        lambda right: right._replace(regions={**right.regions, "more": next(iter(right.regions.values()))}),
    ),
    "a region that is larger than its memory": (Code.REGION_TOO_SMALL, _of_layout(_with_sizes(1 << 30))),
    "regions that are smaller than their tensors": (Code.LAYOUT_INVALID, _of_layout(_with_small_regions)),
}  # fmt: skip


def _of_tensors(change: Callable[[CacheTensor], CacheTensor]) -> Callable[[Stranger], Stranger]:
    return _of_layout(lambda layout: {"tensors": tuple(map(change, layout.tensors))})


# What a rank is like that can read nothing of the others.
OF_OTHER_MODELS: dict[str, tuple[Code, Callable[[Stranger], Stranger]]] = {
    "no stages": (Code.NOT_PP_AWARE, _of_spec(pp_aware=False)),
    "another fingerprint": (Code.LAYOUT_INCOMPATIBLE, _of_spec(fingerprint="other")),
    "another type": (Code.LAYOUT_INCOMPATIBLE, _of_tensors(lambda one: replace(one, dtype="other"))),
    "another encoding": (Code.LAYOUT_INCOMPATIBLE, _of_tensors(lambda one: replace(one, encoding="other"))),
    "other components": (
        Code.COVERAGE_GAP, _of_tensors(lambda one: replace(one, component=f"other {one.component}")),
    ),
    "heads past the last": (
        Code.LAYOUT_INCOMPATIBLE, lambda right: _of_spec(num_kv_heads=right.spec.num_kv_heads + 1)(right),
    ),
}  # fmt: skip


def _is_offered(worker: Worker) -> bool:
    """Whether another process could offer to be this rank: of an engine that spans, its home says so late."""
    shape = worker.engine.shape
    return worker.shape is not None and len({*shape.nodes}) == 1


class Blunders:
    """Makes wrong calls. `wait` lets the world go on until something is true, or so long."""

    def __init__(self, world: World, rng: random.Random, wait: Wait) -> None:
        self._world, self._rng, self._wait = world, rng, wait

    def check(self) -> None:
        """Some wrong calls of a source and of a sink are refused; its process goes on."""
        rng, world = self._rng, self._world
        source, sink = rng.choice(world.sources), rng.choice(world.sinks)
        if (transfer := source.publish(2)) is None:
            return
        can_grow = [one.publisher for one in world.sources if one.shape.can_grow]
        growing = [one for one in can_grow if one.handle is not None and one.shape and _lists(one.shape, [0])]
        transfer.lease_s = NUM_CALLS * ANSWER_S
        self._wait(lambda: transfer.ref is not None, ANSWER_S)
        reader = rng.choice(sink.ranks)
        if reader.node not in source.shape.nodes:  # it forgets what is written
            for name in rng.sample(sorted(OF_READERS), NUM_FULL):
                self._check_full(reader, transfer, name)
        for _ in range(NUM_CALLS):
            drawn = rng.random()
            if drawn < 0.3:
                self._check_call(source.publisher, transfer, "publish", OF_BOTH | OF_PUBLISHES)
            elif drawn < 0.7:
                of_keys = OF_PULLS_WITH_KEYS if world.traits.has_keys else OF_PULLS_WITHOUT_KEYS
                self._check_call(rng.choice(sink.ranks), transfer, "pull", OF_BOTH | OF_PULLS | of_keys)
            elif drawn < 0.78:
                for codes, sent in rng.sample(OF_STRANGERS + OF_RANKS, NUM_STRANGERS):
                    self._check_stranger(reader.node, codes, sent)  # it has engines: it keeps their owners
            elif drawn < 0.82:
                self._check_no_daemon(rng.choice(world.node_names))
                for wrong in rng.sample(WRONG, NUM_WRONG_DAEMONS):
                    self._check_wrong_daemon(reader, wrong)
            elif drawn < 0.87:
                self._check_other_model(sink.ranks[0], transfer)
            elif drawn < 0.94 or not growing:
                self._check_registration(rng.choice([*source.ranks, *sink.ranks]))
            else:
                self._check_growing(rng.choice(growing))
        self._wait(lambda: False, QUIET_WITHIN_S)  # a stranger may have asked for an engine that there is not
        transfer.publisher.do(lambda: transfer.publisher.unpublish(transfer))
        self._wait(lambda: bool(transfer.released), ANSWER_S)  # what follows needs its blocks
        alone = [one for one in world.sources if len({*one.shape.nodes}) == 1]
        pairs = [(one, rank) for one in alone for other in world.sinks for rank in other.ranks]
        if between := [(one, rank) for one, rank in pairs if rank.node not in one.shape.nodes]:
            self._check_false_messages(*rng.choice(between))
        if rng.random() < OWNER_SHARE:
            self._check_owner()

    def _check_full(self, worker: Worker, transfer: Transfer, name: str) -> None:
        """A daemon or a client that has no room for something refuses a pull which needs it, at once."""
        module, _, number = name.rpartition(" ")
        place = importlib.import_module(f"kvxferd.{module}") if module else limits
        usual = getattr(place, number := number if module else "TABLE")
        little: object = 0 if module else {**usual, name: usual[name]._replace(total=1)}
        for value in (little, usual):
            set_on(place, number, value)
            self._world.kill_daemon(worker.node)
            self._world.start_daemon(worker.node)
            self._wait(lambda: False, SETTLED_S)
            if value is little:
                wrong: Wrong = {f"no room for {name}": (OF_READERS[name], lambda call: call)}
                self._check_call(worker, transfer, "pull", wrong)

    def _check_call(self, worker: Worker, transfer: Transfer, what: str, wrong: Wrong) -> None:
        name = self._rng.choice(sorted(wrong))
        code, change = wrong[name]
        deployment = worker.engine.shape.deployment
        lists, longer = (
            draw_request(self._rng, deployment, number, list(range(deployment.num_blocks)))
            for number in (NUM_TOKENS, TOO_MANY_TOKENS)
        )
        assert transfer.ref is not None
        if lists is None:
            return
        if what == "pull":
            assert worker.shape is not None
            lists = own_lists(worker.shape.layout, lists)
            longer = longer and own_lists(worker.shape.layout, longer)
        if call := change(Call(transfer.ref, lists, longer=longer)):
            run = partial(self._call, worker, what, call)
            self._expect(code, f"{worker.name} calls {what} with {name}", run, worker)

    def _check_false_messages(self, source: Engine, reader: Worker) -> None:
        """A daemon refuses messages with a value that is not allowed, and takes the last that is."""
        if (transfer := source.publish(2, grows=False, num_tokens=NUM_TOKENS)) is None:
            return
        transfer.lease_s = NUM_FALSE_MESSAGES * ANSWER_S
        self._wait(lambda: transfer.ref is not None, ANSWER_S)
        world = self._world
        between = Between(world.kernel, world.host_of(reader.node), world.host_of(source.shape.nodes[0]))
        has_pages = {
            "manifests": "core.source.manifests MAX_PAGE_BYTES" in world.traits.small_numbers,
            "grants": world.traits.part_bytes > 0,
        }
        able = [one for one in FALSE_MESSAGES if not has_pages.get(one.pages_of)]
        world.network.change = between.change
        for false in self._rng.sample(able, NUM_FALSE_MESSAGES):
            self._check_false(reader, transfer, false, between)
        self._part(between)
        world.network.change = lambda _, payload: payload
        transfer.publisher.do(lambda: transfer.publisher.unpublish(transfer))
        self._wait(lambda: bool(transfer.released), ANSWER_S)
        self._wait(lambda: False, SETTLED_S)  # engines that span both are whole again

    def _check_false(self, reader: Worker, transfer: Transfer, false: FalseMessage, between: Between) -> None:
        source, ref = transfer.publisher.engine, transfer.ref
        assert ref is not None

        def pull(code: Code, text: str) -> None:
            is_granted = code is not TAKEN and false.name in ("GrantRequest", "GrantReply")
            used = ref if is_granted else replace(ref, nonce="0" * 32)

            def expected() -> Code:
                return TAKEN if between.may_know and not between.was_false else code  # it had nothing to ask

            wrong: Wrong = {text: (expected, lambda call: call._replace(ref=used))}
            self._check_call(reader, transfer, "pull", wrong)

        if false.code is Code.SHAPE_MISMATCH:
            if not self._part(between):
                return
            pull(TAKEN, "what it is to know before")
        if not self._part(between, false):
            return
        if false.code not in (ARRIVES, UNHEARD):
            pull(false.code, false.described)
            return
        if (new := source.publish(1, grows=False)) is not None:
            new.lease_s, new.is_of_liar = UNHEARD_S, True
            self._wait(lambda: new.ref is not None, ANSWER_S)
            reader.engine.pull(new, ANSWER_S)
            is_over = self._wait(lambda: new.is_over, LEASE_S + ANSWER_S)
            if not is_over or {*new.released.values()} != {false.code}:
                text = f"{new.transfer_id} for {reader.engine.shape.name} ends as {new.released.values()}"
                raise Violation(Check.REFUSED, f"{text}, not {false.code}: {false.described}")

    def _part(self, between: Between, false: FalseMessage | None = None) -> bool:
        """Break what joins two daemons: they know nothing of each other, and something is false from then.

        `Between.may_know` says where one may know something still. Not where one asks the other again and
        again; return whether it was done.
        """
        between.false = None
        if not self._wait(lambda: between.is_quiet, QUIET_WITHIN_S):
            return False
        network = self._world.network
        for wire in [one for one in network.wires if {one.dealer.host, one.router.host} == between.hosts]:
            network.cut(wire)
        between.open.clear()  # what is still wanted is sent again
        between.false, between.was_false, num_hellos = false, False, between.num_hellos
        self._wait(lambda: False, ANEW_S)
        between.may_know = between.num_hellos > num_hellos
        return True

    def _expect(
        self,
        code: object,
        what: str,
        run: Callable[[list[object]], None],
        by: Worker | str,
        settle_s: float = 0.0,
        uid: int = STRANGER,
    ) -> None:
        """What `run` calls is refused with its code, and with nothing more. `by`: or a new process's node."""
        answers: list[object] = []
        self._world.tell("blunder", what)
        if isinstance(by, Worker):
            by.do(partial(run, answers))
        else:
            self._world.kernel.spawn(f"stranger at {by}", partial(run, answers), uid=uid)
        self._wait(lambda: False, settle_s)
        self._wait(lambda: bool(answers), ANSWER_S)
        code = code() if callable(code) else code
        codes = [*code] if isinstance(code, tuple) else [code]
        if answers != codes:
            raise Violation(Check.REFUSED, f"{what}: {answers}, not {codes}")

    def _call(self, worker: Worker, what: str, call: Call, answers: list[object]) -> None:
        handle: Any = worker.handle
        made: Any = f"wrong{self._world.take_number()}"
        try:
            if what == "pull":
                made = handle.pull(call.ref, call.lists, call.num_tokens, call.seconds, **call.more).number
            else:
                named = {"transfer_id": made, "lease_s": call.seconds} | call.more
                handle.publish(blocks=call.lists, num_tokens=call.num_tokens, **named)
        except KvxferdError as error:
            answers.append(error.code)
        else:
            worker.answers[made] = answers

    def _check_growing(self, worker: Worker) -> None:
        """A rank that publishes what it has not written yet makes a wrong call about that."""
        name = self._rng.choice(sorted(OF_GROWING))
        code, act = OF_GROWING[name]

        def run(answers: list[object]) -> None:
            handle: Any = worker.handle
            made = f"wrong{self._world.take_number()}"
            ref = handle.publish(made, {}, NUM_TOKENS, ready_tokens=0)
            try:
                act(handle, made)
            except KvxferdError as error:
                answers.append(error.code)
                handle.unpublish(ref)
            else:
                worker.answers[made] = answers

        self._expect(code, f"{worker.name} says {name}", run, worker)

    def _check_stranger(self, node: str, codes: tuple[Code, ...], sent: list[Message | bytes]) -> None:
        """A process that is no client hears why it is refused, and if its connection is closed."""
        is_rank = any(sent is one for _, one in OF_RANKS)
        number = self._world.take_number() if is_rank else 0
        kinds = [one.hex() if isinstance(one, bytes) else type(one).__name__ for one in sent]
        text = f"a {'rank' if is_rank else 'process'} sends {kinds[-4:]}, last {sent[-1]!r:.200}, to {node}"
        path, few = str(self._world.socket_of(node)), self._world.traits.has_few_starts

        def run(answers: list[object]) -> None:
            ends = self._world.heard[node].ends
            add = lambda end: ends.update([end])  # noqa: E731
            answers += be_stranger(path, sent, codes, number, not few, ANSWER_S, add)

        self._expect(codes, text, run, node)
        self._wait(lambda: False, 2 / REGISTER_PER_S if few and is_rank else 0.0)

    def _check_no_daemon(self, node: str) -> None:
        """A client hears at once that there can be no daemon, and keeps nothing."""
        path = self._world.socket_of(node) / "none"

        def run(answers: list[object]) -> None:
            before = self._world.num_fds()
            try:
                client.connect(path, timeout_s=2 * ANSWER_S)
            except KvxferdError as error:
                answers.append(error.code)
            if num_left := self._world.num_fds() - before:
                answers.append(f"{num_left} descriptors are left")

        self._expect(Code.DAEMON_LOST, f"a process looks for a daemon behind that of {node}", run, node)

    def _check_wrong_daemon(self, worker: Worker, wrong: WrongMessage) -> None:
        """A client leaves a daemon that sends what is out of place, and keeps nothing that came from it."""
        text = f"a daemon sends {type(wrong.message).__name__} {wrong.carries} {wrong.to and 'to '}{wrong.to}"
        start = partial(wrong_daemons.start, worker, wrong)
        self._expect("left", text, start, worker.node, 3.0 + wrong.within_s)

    def _check_registration(self, worker: Worker) -> None:
        """A process cannot take the place of a rank, nor one beside it."""
        if not _is_offered(worker):
            return
        name = self._rng.choice(sorted(OF_REGISTRATIONS))
        code, change = OF_REGISTRATIONS[name]
        if self._rng.random() < 0.2:
            self._offer(worker, "what is another user's", Code.NOT_ALLOWED, lambda right: right, STRANGER)
        else:
            self._offer(worker, name, code, change, worker.engine.shape.uid)

    def _check_owner(self) -> None:
        """A name is its user's, although both its engine and its daemon were away."""
        world = self._world
        alone = [engine for engine in world.engines if _is_offered(engine.ranks[0])]
        if not alone:
            return
        worker = self._rng.choice(alone).ranks[0]
        worker.engine.die()
        world.kill_daemon(worker.node)
        world.start_daemon(worker.node)
        self._offer(worker, "what was another user's", Code.NOT_ALLOWED, lambda right: right, STRANGER)
        worker.engine.start()
        self._wait(lambda: world.is_ready, BACK_S)
        self._wait(lambda: False, SETTLED_S)

    def _offer(
        self, worker: Worker, name: str, code: Code, change: Callable[[Stranger], Stranger], uid: int
    ) -> None:
        spec, shape = worker.spec, worker.shape
        assert spec is not None
        assert shape is not None

        def run(answers: list[object]) -> None:
            store, found = Store(shape, worker.engine.shape.memory), set[object]()
            before = self._world.num_fds()
            offered = change(Stranger(spec, shape.layout, store.regions))
            with client.connect(self._world.socket_of(worker.node), timeout_s=5.0) as made:
                for _ in range(2):  # the connection can be used again
                    try:
                        worker.register_rank(made, *offered, ANSWER_S)
                        found.add("registered")
                    except KvxferdError as error:
                        found.add(error.code)
            num_left = self._world.num_fds() - before
            if num_left and worker.engine.shape.memory is not MemoryKind.RESIDENT:
                found.add(f"{num_left} descriptors are left")
            answers.extend(found)

        self._expect(code, f"a process wants to be {worker.name} with {name}", run, worker.node, uid=uid)

    def _check_other_model(self, worker: Worker, transfer: Transfer) -> None:
        """An engine of another model cannot read."""
        has_stages = any(rank.pp_rank for rank in transfer.publisher.engine.shape.deployment.ranks)
        name = self._rng.choice([name for name in OF_OTHER_MODELS if has_stages or name != "no stages"])
        code, change = OF_OTHER_MODELS[name]
        spec, shape, deployment = worker.spec, worker.shape, worker.engine.shape.deployment
        drawn = draw_request(self._rng, deployment, NUM_TOKENS, list(range(deployment.num_blocks)))
        if spec is None or shape is None or drawn is None:
            return
        engine = EngineId(f"other{self._world.take_number()}")
        end = End(transfer.transfer_id, engine, Rank(spec.pp_rank, spec.tp_rank))

        def run(answers: list[object]) -> None:
            with client.connect(self._world.socket_of(worker.node), timeout_s=5.0) as made:
                store = Store(shape, MemoryKind.SHARED)
                right = Stranger(replace(spec, engine_id=engine), shape.layout, store.regions)
                other = change(right)
                rank = made.register(other.spec, other.layout, other.regions, timeout_s=ANSWER_S)
                rank.pull(transfer.handed_on, own_lists(other.layout, drawn), NUM_TOKENS, ANSWER_S)
                self._world.kernel.wait(((rank.fileno(), select.EPOLLIN),), ANSWER_S)
                for event in rank.poll():
                    answers.append(getattr(event, "code", event))
                    self._world.heard[worker.node].ends[end._replace(code=answers[-1])] += 1

        self._expect(code, f"an engine like {worker.name} with {name} pulls", run, worker.node)
