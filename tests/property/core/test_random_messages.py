"""Whatever anybody says, in whatever order: the node never raises, its books agree, and nothing is left.

Messages are of the right types and otherwise nonsense. Names come from small pools and from what the
node itself has said, so that nonsense meets real sessions, movers, questions, grants and transfers.
"""

from __future__ import annotations

import types
import typing
from enum import EnumMeta
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxferd.core import Node, Settings
from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.errors import Code, ProtocolError
from kvxferd.ids import Rank
from kvxferd.layout import EngineSpec, PackedBlocks, RankLayout, pack_ids
from kvxferd.layout.presets import attention_layout
from kvxferd.wire import mover as mv
from kvxferd.wire import peer as pr
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import CLIENT_MESSAGES, FROM_MOVER, PEER_MESSAGES, Decoder, encode
from kvxferd.wire.common import Binding, Message, RankManifest, Refusal, RegionAddress, TransferRef
from kvxferd.wire.limits import MAX_FRAME_BYTES
from tests.support.simulation import spec_of

pytestmark = pytest.mark.slow

HERE, THERE, ELSEWHERE = "tcp://here:1", "tcp://there:1", "tcp://elsewhere:1"
BLOCKS = {"full": PackedBlocks(pack_ids([3, 1, 2]))}
TOKENS = 11

INTS = [4096, -(2**63), -1, 0, 1, 2, 3, TOKENS, 2**31, 2**63, 2**64 - 1]
FLOATS = [5.0, float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 1e-300, 0.5, 1e300]
STRINGS = ["x", "", "é\x00", "y" * 300]
BYTES = [bytes(16), b"", b"\x01", bytes(range(16)), pack_ids([5])]
# What a field of this name is drawn from, whatever its message. What makes sense comes first.
POOLS: dict[str, list[Any]] = {
    "engine_id": ["e", "f"],
    "generation": ["1", "2"],
    "transfer_id": ["t1", "t2", "t1", "y" * 300],
    "nonce": ["n", "n", "m"],
    "num_ranks": [1, 2, 0, -1],
    "num_readers": [2, 1, 0, 2**63],
    "lease_s": [30.0, *FLOATS],
    "fence_agent": ["boot/1"],
    "delivered": [True, False],
    "finished": [True, False],
    "on": [True, False],
    "endpoint": [THERE, HERE, THERE, ELSEWHERE, "ipc:///tmp/x", ""],
    "incarnation": ["i", "j"],
    "boot": ["b1", "b2"],
    "num_tokens": [TOKENS, TOKENS, TOKENS, 0, 2**64 - 1],
    "rank": [Rank(0, 0), Rank(0, 1), Rank(-1, 5)],
    "ticket": [1, 2, 3],
    "stream": [0, 0, 0, 1],
    "versions": [wk.WORKER_VERSIONS],
    "fence_slot": [0, 1],
    "deadline_s": [5.0, 5.0, 0.1, *FLOATS],
    "wait_s": [5.0, 5.0, *FLOATS],
}


def spec(name: str, generation: str, home: str, tp_rank: int, pp: int) -> EngineSpec:
    made = spec_of(name, tp=1 + tp_rank, pp=pp, generation=generation, home=home)
    return msgspec.structs.replace(made, tp_rank=tp_rank)


def layout(block_tokens: int) -> RankLayout:
    return attention_layout(
        spec=spec("e", "1", "", 0, 1),
        num_kv_heads=2,
        head_dim=2,
        block_tokens=block_tokens,
        num_blocks=8,
        layout="HND",
    )


LAYOUTS = [layout(4), layout(4), layout(8)]


def decoded(decoder: Decoder[Any], message: Message) -> Any:
    """The message as it arrives; None where a field is longer than it may be: the shell drops it."""
    try:
        return decoder.decode(encode(message))
    except ProtocolError:
        return None


class Chaos:
    """A node, and everything that it has said which nonsense can refer to."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.now = 0.0
        tokens = iter(range(10**9))
        self.node = Node(
            boot="boot",
            endpoint=HERE,
            settings=Settings(),
            new_token=lambda: f"{next(tokens):032x}",
        )
        self.sessions: list[int] = []
        self.wanted: list[int] = []  # sessions that a mover was asked for
        self.movers: dict[int, str] = {}
        self.grants: list[str] = ["grant"]
        self.asked: dict[str | bytes, list[int]] = {}
        self.questions: dict[type[Message], list[tuple[str | bytes, int]]] = {}
        self.sensible = False  # draw what comes first, as far as there is a choice

    def draw(self, values: list[Any]) -> Any:
        return self.data.draw(st.sampled_from(values))

    def pick(self, values: list[Any]) -> Any:
        return values[0] if self.sensible else self.draw(values)

    def chance(self, of: int = 4) -> bool:
        return not self.sensible and self.draw([False] * (of - 1) + [True])

    # --- nonsense

    def value(self, hint: Any, name: str, numbers: list[int]) -> Any:
        """Something of the hinted type."""
        special = self.special(name, numbers)
        if special is not None:
            return special
        if name in POOLS:
            return self.pick(POOLS[name])
        hint = getattr(hint, "__supertype__", hint)
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union):
            return self.value(self.pick(list(args)), name, numbers)
        if origin is tuple and args[-1] is ...:
            return tuple(self.value(args[0], name, numbers) for _ in range(self.pick([1, 0, 2])))
        if origin is tuple:
            return tuple(self.value(arg, name, numbers) for arg in args)
        if origin is dict:
            return {self.value(args[0], name, numbers): self.value(args[1], name, numbers)}
        if isinstance(hint, EnumMeta):
            return self.pick(list(hint))
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            return self.struct(hint, numbers)
        pools: dict[Any, list[Any]] = {int: INTS, float: FLOATS, str: STRINGS, bytes: BYTES}
        pools |= {bool: [True, False], type(None): [None], Rank: POOLS["rank"]}
        pools[msgspec.UnsetType] = [msgspec.UNSET]
        return self.pick(pools[hint])

    def special(self, name: str, numbers: list[int]) -> Any:
        """What depends on the node's state, or would hardly ever be right by chance."""
        agents = [*self.movers.values(), "stranger"]
        odd = [{}, {"full": PackedBlocks(b"")}, {"x": PackedBlocks(b"1")}]
        drawn: dict[str, list[Any]] = {
            "request": numbers[-8:] or [1, 2, 3],
            "grant": self.grants[-6:],
            "agent": agents,
            "fence_agent": agents,
            "blocks": [BLOCKS, *odd],
            "layout": LAYOUTS,
            "session": [*self.sessions, 0],
            "pull": [1, 2, 3, 4],
            "mover": [*self.movers, 99],
            "engine_id": ["e", "f"],
            "reads": [((Rank(0, 0), agents[0]),), ()],
        }
        if name in drawn:
            return self.draw(drawn[name])
        if name in ("engine", "spec"):
            home = self.pick(["", HERE, THERE, "nonsense"])
            generation, tp_rank, pp = self.pick(["1", "2"]), self.pick([0, 1]), self.pick([1, 2])
            return spec(self.draw(["e", "f"]), generation, home, tp_rank, pp)
        return None

    def struct(self, kind: type[msgspec.Struct], numbers: list[int]) -> Any:
        if kind is wk.RegionExport:
            region = LAYOUTS[0].regions[0]
            return wk.RegionExport(region.region, region.size_bytes, 0)
        if kind is RegionAddress:
            region = LAYOUTS[0].regions[0]
            return RegionAddress(region.region, 4096, region.size_bytes)
        hints = typing.get_type_hints(kind)
        return kind(**{name: self.value(hints[name], name, numbers) for name in kind.__struct_fields__})

    def message(self, union: Any, numbers: list[int]) -> Message:
        self.sensible = not self.chance(3)
        try:
            return self.struct(self.draw(list(typing.get_args(union))), numbers)
        finally:
            self.sensible = False

    # --- what happens

    def feed(self, event: ev.Event) -> None:
        effects = self.node.feed(event, self.now)
        self.node.check_integrity()
        self.node.snapshot()
        for effect in effects:
            self.note(effect)

    def note(self, effect: fx.Effect) -> None:
        match effect:
            case fx.SendToPeer() | fx.ReplyToPeer():
                to = effect.endpoint if isinstance(effect, fx.SendToPeer) else effect.route
                numbers = self.asked.setdefault(to, [])
                if isinstance(number := getattr(effect.message, "request", None), int):
                    numbers.append(number)
                    self.questions.setdefault(type(effect.message), []).append((to, number))
                if isinstance(grant := getattr(effect.message, "grant", None), str):
                    self.grants.append(grant)
            case fx.SendToWorker() | fx.SendToMover() | fx.BindMover():
                assert len(encode(effect.message)) <= MAX_FRAME_BYTES
            case fx.RequestMover():
                self.wanted.append(effect.session)
            case fx.KillMover():
                assert effect.mover in self.movers

    def open(self) -> None:
        session = len(self.sessions) + 1
        self.sessions.append(session)
        self.feed(ev.WorkerConnected(session, 1, 0))
        if not self.chance(8):
            self.feed(ev.WorkerMessage(session, wk.Hello(versions=wk.WORKER_VERSIONS, client="")))

    def worker_says(self) -> None:
        said = self.message(wk.ClientMessage, [])
        word = self.pick([bytes(16), bytes(16), b""])
        if (message := decoded(CLIENT_MESSAGES, said)) is not None:
            self.feed(ev.WorkerMessage(self.draw([*self.sessions, 99]), message, None, word))

    def worker_goes(self) -> None:
        self.feed(ev.WorkerDisconnected(self.draw([*self.sessions, 99])))

    def mover_comes(self) -> None:
        if self.wanted:
            session = self.wanted.pop(self.draw(list(range(len(self.wanted)))))
            if self.chance(8):
                self.feed(ev.MoverUnavailable(session, Refusal(Code.NIXL_UNAVAILABLE, "none")))
                return
            number = len(self.movers) + 1
            self.movers[number] = f"boot/{number}"
            self.feed(ev.MoverAssigned(session, number, f"boot/{number}", "simulated"))

    def mover_says(self) -> None:
        said = decoded(FROM_MOVER, self.message(mv.FromMover, []))
        if said is not None:
            self.feed(ev.MoverMessage(self.draw([*self.movers, 99]), said))

    def mover_binds(self) -> None:
        """Something sensible, or no rank would ever be ready."""
        bound = mv.Bound(regions=(self.struct(RegionAddress, []),), metadata=b"")
        self.feed(ev.MoverMessage(self.draw([*self.movers, 99]), bound))

    def mover_dies(self) -> None:
        self.feed(ev.MoverDied(self.draw([*self.movers, 99])))

    def peer_says(self) -> None:
        endpoint = self.draw([HERE, THERE, ELSEWHERE])
        said = decoded(PEER_MESSAGES, self.message(pr.PeerMessage, self.asked.get(endpoint, [])))
        if said is not None:
            self.feed(ev.PeerReply(endpoint, said))

    def route_says(self) -> None:
        route = self.draw([b"r1", b"r2"])
        said = decoded(PEER_MESSAGES, self.message(pr.PeerMessage, self.asked.get(route, [])))
        if said is not None:
            self.feed(ev.PeerRequest(route, said))

    def answer(self, question: type[Message], **fields: Any) -> None:
        """A peer answers what it was asked, as it should."""
        kind = {pr.PeerHello: pr.PeerWelcome, pr.FetchEngine: pr.EngineManifest, pr.AskGrant: pr.Granted}[
            question
        ]
        if asked := self.questions.get(question):
            to, number = self.draw(asked[-3:])
            self.sensible = True
            made = msgspec.structs.replace(self.struct(kind, [number]), **fields)
            self.sensible = False
            self.feed(ev.PeerReply(to, made))

    def greeting(self) -> None:
        self.answer(pr.PeerHello)

    def manifest(self) -> None:
        """The engine that the sink reads, as its node would state it."""
        binding = Binding("there/1", b"", (self.struct(RegionAddress, []),), "i")
        self.answer(pr.FetchEngine, ranks=(RankManifest(spec("e", "1", "", 0, 1), LAYOUTS[0], binding),))

    def granted(self) -> None:
        self.answer(pr.AskGrant, blocks=BLOCKS)

    def reader_asks(self) -> None:
        """A peer asks for the transfer as it should."""
        self.sensible = True
        question = self.struct(pr.AskGrant, [7, 8])
        self.sensible = False
        ref = TransferRef(HERE, "e", "1", "t1", "n")
        reads = ((Rank(0, 0), "boot/1"),)
        self.feed(ev.PeerRequest(b"r1", msgspec.structs.replace(question, ref=ref, reads=reads)))
        self.feed(ev.MoverMessage(1, mv.Polling(token=0)))

    def begin(self) -> None:
        """A source, a sink and a transfer that make sense, and a pull from a peer that was greeted."""
        self.sensible = True
        for number, name in enumerate(["e", "f"], 1):
            self.open()
            said = self.struct(wk.Register, [])
            self.hear(
                number, msgspec.structs.replace(said, engine=spec(name, "1", "", 0, 1), layout=LAYOUTS[0])
            )
            self.mover_comes()
            self.feed(
                ev.MoverMessage(number, mv.Bound(regions=(self.struct(RegionAddress, []),), metadata=b""))
            )
            self.feed(ev.MoverMessage(number, mv.FenceMapped(session=number, address=4096, metadata=b"")))
        self.hear(1, msgspec.structs.replace(self.struct(wk.Publish, []), blocks=BLOCKS))
        for _ in range(2):
            ref = TransferRef(THERE, "e", "1", "t1", "n")
            self.hear(2, msgspec.structs.replace(self.struct(wk.Pull, []), ref=ref, blocks=BLOCKS))
        self.sensible = False
        self.greeting()
        self.manifest()

    def hear(self, session: int, message: Message) -> None:
        self.feed(ev.WorkerMessage(session, CLIENT_MESSAGES.decode(encode(message)), None, bytes(16)))

    def time_passes(self) -> None:
        self.now += self.draw([0.01, 0.6, 3.0, 31.0, 700.0])
        self.feed(ev.Tick())

    def step(self) -> None:
        says = [self.worker_says] * 6 + [self.mover_says] * 2 + [self.peer_says] * 3 + [self.route_says] * 4
        does = [self.open, self.mover_comes, self.mover_comes, self.mover_binds, self.mover_binds]
        answers = [self.greeting, self.manifest, self.granted, self.granted, self.reader_asks]
        rare = [self.mover_dies, self.worker_goes, self.time_passes, self.time_passes]
        self.draw([*says, *does, *answers, *rare])()

    def end(self) -> None:
        """Everybody goes and nobody answers; time passes."""
        for session in self.sessions:
            self.feed(ev.WorkerDisconnected(session))
        for mover in self.movers:
            self.feed(ev.MoverDied(mover))
        for _ in range(10_000):
            deadline = self.node.next_deadline()
            if deadline is None:
                return
            self.now = max(self.now, deadline)
            self.feed(ev.Tick())
        raise AssertionError("its timers never end")

    def left(self) -> dict[str, int]:
        """How much the node still remembers."""
        node = self.node
        transfers = node.published.table
        counted = {
            "sessions": node.sessions,
            "engines": list(node.registry),
            "movers": node.movers._movers,
            "pulls": node.pulls,
            "questions": node.peer_requests,
            "peers": node.peers._peers,
            "holds": node.grant_client.num_grants(),
            "transfers": transfers.live,
            "tombstones": transfers.tombstones,
            "grants": transfers.by_grant,
            "early ready": transfers.early_ready,
            "asks": node.grant_server._pending,
            "fetches": node.handshake_server._pending,
            "attendants": node.poll_requests._states,
            "waiting for attendants": node.member._pending,
            "members": node.home._members,
            "fence pages": node.fence_pages._requested,
        }
        return {name: len(found) for name, found in counted.items() if len(found)}


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_nonsense_makes_a_node_raise_or_remember_for_ever(data):
    chaos = Chaos(data)
    chaos.begin()
    for _ in range(data.draw(st.integers(0, 50))):
        chaos.step()
    chaos.end()
    assert chaos.left() == {}
