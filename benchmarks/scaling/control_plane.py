"""One core among many engines: its cost as the numbers of engines, transfers and waiting readers grow.

Everything but the core is simulated. Each local rank publishes and pulls at the same rate;
readers, and this node, hold their grants long enough for them to be renewed.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from kvxferd.config import LimitsConfig
from kvxferd.core import events as ev
from kvxferd.core.settings import Settings
from kvxferd.ids import (
    AgentName,
    BootId,
    Endpoint,
    EngineId,
    Generation,
    GrantId,
    Rank,
    TransferId,
)
from kvxferd.wire import peer
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.common import Message, RankManifest, TransferRef
from kvxferd.wire.limits import FENCE_WORD_BYTES
from scaling.engines import (
    LARGE,
    NODE,
    DeploymentShape,
    block_ids_of,
    blocks_of,
    manifest,
    renamed,
)
from scaling.simulated_node import FENCE_METADATA, Cost, Meter, MeteredWorld
from tests.support.simulation import Worker, mover_of

NUM_TOKENS = 2048
NETWORK_S = 0.0001
HOLD_S = 6.0  # from the prepare, or the grant, to the end: a lease of 30 s is renewed every 5 s
FAR_READERS = 200  # connections of readers to this node
# The default limits are for a node of today's clusters; this simulation goes beyond them.
LIMITS = LimitsConfig(max_peers=4096, max_transfers_per_engine=65_536, max_pulls_per_rank=65_536)
FIRST = Rank(0, 0)


@dataclass(frozen=True)
class Load:
    """The load on the core."""

    num_engines: int = 1000
    transfers_per_rank: float = 50.0  # a second: as many published as pulled
    num_waiting: int = 0  # readers that wait for transfers which are not published yet
    seconds: float = 20.0
    local: DeploymentShape = NODE
    remote: DeploymentShape = LARGE


@dataclass(frozen=True)
class LoadResult:
    """What a load cost."""

    load: Load
    learn_ms: float  # the core's time to connect to one engine: manifest, plans of all local ranks
    learn_kib: float  # memory kept for one engine
    core_percent: float  # of a processor, while transfers come and go
    us_per_event: dict[str, float]
    num_events: dict[str, int]
    run_mib: float  # growth of memory by the end, the simulation's own bookkeeping included
    num_grants_held: int
    num_grants_given: int
    num_delivered: int


class SimulatedPeers(MeteredWorld):
    """One node, and all others: they reply at once, and read what is published here."""

    def __init__(self, engines: dict[Endpoint, bytes], meter: Meter) -> None:
        super().__init__(Settings(limits=LIMITS), meter)
        self.host("here")
        self.node = self.hosts["here"]
        self._engines = engines
        self._requests = itertools.count(1)
        self._blocks = blocks_of(NUM_TOKENS)
        self._pending: dict[int, peer.GrantRequest] = {}
        self.num_granted = 0

    def post(self, source: str, target: str, event: Callable[[Message], ev.Event], message: Message) -> None:
        """Handle a message of the core to another node."""
        endpoint = Endpoint(f"tcp://{target}:9441")
        if endpoint in self._engines:
            reply = self._reply_to(message, endpoint)
            self.schedule.after(NETWORK_S, self.node.feed, ev.PeerReply(endpoint, reply))
        elif isinstance(message, peer.GrantReply):
            self._granted(message, target.encode())

    def _reply_to(self, requested: Message, endpoint: Endpoint) -> peer.ReplyMessage:
        match requested:
            case peer.PeerHello():
                return peer.PeerWelcome(
                    request=requested.request, version=1, versions=peer.PEER_VERSIONS, boot=BootId("far")
                )
            case peer.ManifestRequest():
                said = PEER_MESSAGES.decode(self._engines[endpoint])  # new objects, as in production
                assert isinstance(said, peer.ManifestReply)
                return msgspec.structs.replace(said, request=requested.request)
            case peer.GrantRequest():
                return peer.GrantReply(
                    request=requested.request,
                    grant=requested.grant,
                    blocks=self._blocks,
                    num_tokens=NUM_TOKENS,
                    lease_s=30.0,
                    fence_agent=requested.reads[0][1],
                    fence_address=1 << 41,
                    fence_word=bytes(FENCE_WORD_BYTES),
                    fence_metadata=FENCE_METADATA,
                )
            case peer.RenewGrants():
                return peer.GrantsRenewed(request=requested.request, ended=())
            case peer.Acknowledge() | peer.ReleaseGrant() | peer.AbandonTransfer():
                return peer.RequestDone(request=requested.request)
        raise AssertionError(f"nobody answers {requested}")

    def request_grant(self, ref: TransferRef, reads: AgentName) -> None:
        """Have a rank of a remote engine request a grant, hold it, and acknowledge."""
        number = next(self._requests)
        reader = f"reader-{number % FAR_READERS}"
        request = peer.GrantRequest(
            request=number,
            grant=GrantId(f"{number:032x}"),
            ref=ref,
            consumer=peer.Consumer(EngineId(reader), Generation("g1"), FIRST, 1),
            reads=((FIRST, reads),),
            wait_s=10.0,
        )
        self._pending[number] = request
        self.node.feed(ev.PeerRequest(reader.encode(), request))

    def _granted(self, message: peer.GrantReply, route: bytes) -> None:
        self.num_granted += 1
        requested = self._pending.pop(message.request)
        renew = peer.RenewGrants(request=next(self._requests), grants=(requested.grant,))
        done = peer.Acknowledge(
            request=next(self._requests),
            grant=requested.grant,
            ref=requested.ref,
            consumer=requested.consumer,
            bytes=0,
        )
        self.schedule.after(5.0, self.node.feed, ev.PeerRequest(route, renew))
        self.schedule.after(HOLD_S, self.node.feed, ev.PeerRequest(route, done))


def far_engines(shape: DeploymentShape, number: int) -> dict[Endpoint, bytes]:
    """Return encoded manifests of `number` engines, each with its own home."""
    template = manifest(shape, "template")
    engines = {}
    for index in range(number):
        ranks = tuple(_of_engine(one, f"remote-{index}") for one in template)
        reply = peer.ManifestReply(request=0, boot=BootId("far"), ranks=ranks, num_ranks=len(ranks))
        engines[Endpoint(f"tcp://far-{index}:9441")] = encode(reply)
    return engines


def _of_engine(one: RankManifest, name: str) -> RankManifest:
    agent = AgentName(one.binding.agent.replace("template", name))
    return RankManifest(
        renamed(one.spec, name), one.layout, msgspec.structs.replace(one.binding, agent=agent)
    )


class ControlPlaneRun:
    """One run of one load."""

    def __init__(self, load: Load, meter: Meter = time.thread_time) -> None:
        self._load = load
        engines = far_engines(load.remote, load.num_engines)
        self._homes = list(engines)
        self.world = world = SimulatedPeers(engines, meter)
        self._numbers = itertools.count(1)
        self._sinks = [world.register_with(world.node, *rank) for rank in load.local.ranks("local")]
        # Each source rank is an engine of its own, so that as many transfers are published as pulled.
        alone = DeploymentShape(tp=1, model=load.local.model)
        self._sources = [
            world.register_with(world.node, *alone.ranks(f"source-{i}")[0])
            for i in range(load.local.num_ranks)
        ]
        world.run(1.0)

    def pull_from_all(self) -> None:
        """Have every local rank pull once from every remote engine, so that all are planned and connected."""
        for index in range(len(self._homes)):
            for sink in self._sinks:
                self._pull(sink, self._ref(index), held_s=0.0)
            self.world.run(0.01)
        self.world.run(2.0)

    def wait_for_publishes(self) -> None:
        """Have readers request transfers that are still being computed."""
        for number in range(self._load.num_waiting):
            source = self._sources[number % len(self._sources)]
            ref = msgspec.structs.replace(
                self._ref(0),
                endpoint=self.world.node.endpoint,
                engine_id=source.spec.engine_id,
            )
            self.world.request_grant(ref, mover_of(source).agent)

    def run(self) -> None:
        """Start and end transfers at their rates."""
        step = 1.0 / self._load.transfers_per_rank
        for number, (sink, source) in enumerate(zip(self._sinks, self._sources, strict=True)):
            offset = step * number / len(self._sinks)
            self.world.schedule.after(offset, self._every, step, partial(self._pull_some, sink))
            self.world.schedule.after(offset, self._every, step, partial(self._publish, source))
        self.world.run(self._load.seconds)

    def _every(self, step: float, act: Callable[[], None]) -> None:
        act()
        self.world.schedule.after(step, self._every, step, act)

    def _ref(self, home: int) -> TransferRef:
        name = TransferId(f"t{next(self._numbers)}")
        engine = EngineId(f"remote-{home}")
        return TransferRef(self._homes[home], engine, Generation("g1"), name, "0" * 32)

    def _pull_some(self, sink: Worker) -> None:
        self._pull(sink, self._ref(next(self._numbers) % len(self._homes)), HOLD_S)

    def _pull(self, sink: Worker, ref: TransferRef, held_s: float) -> None:
        sink.say(wk.Prepare(ref=ref))
        ids = block_ids_of(NUM_TOKENS, next(self._numbers))
        self.world.schedule.after(held_s, sink.pull, ref, ids, NUM_TOKENS, 30.0)

    def _publish(self, source: Worker) -> None:
        number = next(self._numbers)
        ref = source.publish(f"p{number}", block_ids_of(NUM_TOKENS, number), NUM_TOKENS)
        self.world.schedule.after(0.01, self.world.request_grant, ref, mover_of(source).agent)


def measure(load: Load, meter: Meter = time.thread_time) -> LoadResult:
    """Run one load and return its cost, in seconds unless another meter is given."""
    plane = ControlPlaneRun(load, meter)
    host, num_ranks = plane.world.node, load.local.num_ranks
    gc.collect()
    before = _resident_kib()
    host.cost = Cost()
    plane.pull_from_all()
    gc.collect()
    met = _resident_kib()
    learn_s, host.cost = host.cost.total_s, Cost()
    num_met = host.outcomes["TicketDelivered"]
    if num_met != num_ranks * load.num_engines:
        raise AssertionError(f"{num_met} pulls were delivered of {num_ranks * load.num_engines}")
    plane.wait_for_publishes()
    host.cost = Cost()
    plane.run()
    cost = host.cost
    return LoadResult(
        load=load,
        learn_ms=1e3 * learn_s / load.num_engines,
        learn_kib=(met - before) / load.num_engines,
        core_percent=100 * cost.total_s / load.seconds,
        us_per_event={kind: 1e6 * cost.seconds[kind] / count for kind, count in cost.events.items()},
        num_events=dict(cost.events),
        run_mib=(_resident_kib() - met) / 1024,
        num_grants_held=sum(host.node.grant_client.num_grants().values()),
        num_grants_given=plane.world.num_granted,
        num_delivered=host.outcomes["TicketDelivered"] - num_met,
    )


def _resident_kib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4.0
