"""A fleet of real cores, prefill and decode nodes: which messages they exchange, and which limit comes first.

Every node is one engine of eight ranks. A request is published by a prefill node, prepared and pulled
by all ranks of one decode node, and acknowledged. Workers, movers and the network are simulated.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from kvxferd.core import events as ev
from kvxferd.ids import AgentName, GrantId
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.common import Message, TransferRef
from kvxferd.wire.limits import FENCE_WORD_BYTES
from kvxferd.wire.peer import GrantReply
from scaling.engines import BLOCK_TOKENS, NODE, DeploymentShape, block_ids_of, blocks_of
from scaling.simulated_node import FENCE_METADATA, MeteredHost, MeteredWorld
from tests.support.simulation import Envelope, Worker

NETWORK_S = 0.0002
# A request is prepared when its prefill begins: the decode node holds the grant until it pulls. Some
# wait longer, behind others, and their grants are renewed.
PREPARED_S, PREPARED_EARLY_S, SHARE_EARLY = 1.0, 8.0, 0.1
HANDSHAKE = frozenset({"Greet", "Greeting", "ManifestRequest", "ManifestReply"})


@dataclass(frozen=True)
class FleetConfig:
    """The fleet and its load."""

    num_prefill: int = 100
    num_decode: int = 200
    requests_per_s: float = 200.0  # of the whole fleet
    num_tokens: int = 8192
    seconds: float = 6.0
    shape: DeploymentShape = NODE


@dataclass(frozen=True)
class MessageRate:
    """The rate of one kind of message, per node and second."""

    kind: str
    sender: str  # prefill or decode
    per_s: float
    bytes_per_s: float
    expected_per_s: float  # by the formula


@dataclass(frozen=True)
class FleetResult:
    """The result. Handshakes are counted separately: a fleet whose nodes are connected makes none."""

    fleet: FleetConfig
    num_requests: int
    num_delivered: int
    said: list[MessageRate]
    num_handshakes: int
    handshake_bytes: float  # of one
    core_ms_per_request: dict[str, float]  # processor time of the core, on a prefill and on a decode node
    codec_us_per_message: float
    limits: dict[str, float]  # requests per second of one node at which each resource is full


class FleetSimulation(MeteredWorld):
    """A simulation of one fleet."""

    def __init__(self, fleet: FleetConfig) -> None:
        super().__init__()
        self._fleet = fleet
        self._load_rng = random.Random(1)
        self._requests = itertools.count(1)
        self.sent: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.prefill = [self._make_node(f"prefill-{i}") for i in range(fleet.num_prefill)]
        self.decode = [self._make_node(f"decode-{i}") for i in range(fleet.num_decode)]
        self.run(1.0)

    def _make_node(self, name: str) -> tuple[MeteredHost, list[Worker]]:
        host = self.host(name)
        return self.hosts[name], [self.register_with(host, *rank) for rank in self._fleet.shape.ranks(name)]

    def post(self, source: str, target: str, event: Callable[[Message], ev.Event], message: Message) -> None:
        """Count a message, and have it arrive."""
        envelope = Envelope(source, target, event, encode(message))
        kind = (type(message).__name__, source.partition("-")[0])
        self.sent[kind] += 1
        self.bytes[kind] += len(envelope.payload)
        self.schedule.after(NETWORK_S, self.arrive, envelope)

    def run_requests(self) -> int:
        """Start requests at random times; return their number."""
        fleet, at, count = self._fleet, 0.0, 0
        while (at := at + self._load_rng.expovariate(fleet.requests_per_s)) < fleet.seconds:
            self.schedule.after(at, self._request)
            count += 1
        self.run(fleet.seconds + PREPARED_EARLY_S + 3.0)
        return count

    def _request(self) -> None:
        num_tokens = self._fleet.num_tokens
        _, publishers = self._load_rng.choice(self.prefill)
        _, readers = self._load_rng.choice(self.decode)
        number = next(self._requests)
        ref = publishers[0].publish(f"r{number}", block_ids_of(num_tokens, number), num_tokens)
        for worker in publishers[1:]:
            worker.ready(ref.transfer_id)
        for worker in readers:
            worker.say(wk.Prepare(ref=ref))
        held_s = PREPARED_EARLY_S if self._load_rng.random() < SHARE_EARLY else PREPARED_S
        self.schedule.after(held_s, self._pull, readers, ref)

    def _pull(self, readers: list[Worker], ref: TransferRef) -> None:
        ids = block_ids_of(self._fleet.num_tokens, next(self._requests))
        for worker in readers:
            worker.pull(ref, ids, self._fleet.num_tokens, deadline_s=30.0)


# Messages per request and rank of the reader, once the two nodes are connected.
PER_RANK = {
    "GrantRequest": "decode",
    "GrantReply": "prefill",
    "Acknowledge": "decode",
    "RequestDone": "prefill",
}


def measure(fleet: FleetConfig) -> FleetResult:
    """Run a fleet and return its message rates, costs and limits."""
    simulation = FleetSimulation(fleet)
    for host, _ in (*simulation.prefill, *simulation.decode):
        host.cost.seconds.clear()
        host.cost.events.clear()
    count = simulation.run_requests()
    delivered = sum(host.outcomes["TicketDelivered"] for host, _ in simulation.decode)
    if delivered != count * fleet.shape.num_ranks:
        raise AssertionError(f"{delivered} pulls were delivered, of {count} requests")
    nodes = {"prefill": fleet.num_prefill, "decode": fleet.num_decode}
    said = []
    for (kind, sender), sent in sorted(simulation.sent.items()):
        if kind in HANDSHAKE:
            continue
        share = nodes[sender] * fleet.seconds
        expected = count * fleet.shape.num_ranks / share if PER_RANK.get(kind) == sender else 0.0
        said.append(MessageRate(kind, sender, sent / share, simulation.bytes[kind, sender] / share, expected))
    shaken = simulation.sent["ManifestReply", "prefill"]
    core_ms = {
        name: 1e3 * sum(_seconds_without_handshakes(host) for host, _ in group) / count
        for name, group in (("prefill", simulation.prefill), ("decode", simulation.decode))
    }
    codec = _codec_us(fleet.num_tokens)
    return FleetResult(
        fleet=fleet,
        num_requests=count,
        num_delivered=delivered,
        said=said,
        num_handshakes=shaken,
        handshake_bytes=simulation.bytes["ManifestReply", "prefill"] / max(1, shaken),
        core_ms_per_request=core_ms,
        codec_us_per_message=codec,
        limits=_limits(fleet, core_ms, said, count, codec),
    )


def _seconds_without_handshakes(host: MeteredHost) -> float:
    seconds = host.cost.seconds
    return sum(spent for kind, spent in seconds.items() if kind not in HANDSHAKE)


def _codec_us(num_tokens: int) -> float:
    """Return the microseconds of the largest usual message, a grant: encode, two ZMQ sockets, decode.

    It is the CPU time of all threads, ZMQ's own included.
    """
    context = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    try:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        dealer.connect(f"tcp://127.0.0.1:{port}")
        message = GrantReply(
            request=1,
            grant=GrantId("0" * 32),
            blocks=blocks_of(num_tokens),
            num_tokens=num_tokens,
            lease_s=30.0,
            fence_agent=AgentName("source/0-0"),
            fence_address=1 << 41,
            fence_word=bytes(FENCE_WORD_BYTES),
            fence_metadata=FENCE_METADATA,
        )
        dealer.send(encode(message))
        router.recv_multipart()
        rounds = 2000
        began = time.process_time()
        for _ in range(rounds):
            dealer.send(encode(message))
            PEER_MESSAGES.decode(router.recv_multipart()[1])
        return 1e6 * (time.process_time() - began) / rounds
    finally:
        router.close(linger=0)
        dealer.close(linger=0)
        context.term()


NIC_BYTES_PER_S = 8 * 50e9  # eight ports of 400 Gb/s
CONTROL_BYTES_PER_S = 1.25e9 / 100  # one part in a hundred of a 10 Gb/s control network
LLAMA_70B_BYTES_PER_TOKEN = 80 * 2 * 8 * 128 * 2


def _limits(
    fleet: FleetConfig, core_ms: dict[str, float], said: list[MessageRate], count: int, codec_us: float
) -> dict[str, float]:
    """Return the requests per second at which a node's daemon, network cards and control traffic are full."""
    nodes = {"prefill": fleet.num_prefill, "decode": fleet.num_decode}
    found = {}
    for role, number in nodes.items():
        other = "decode" if role == "prefill" else "prefill"
        per_s = count / fleet.seconds / number  # requests a second of one such node
        out = sum(s.per_s for s in said if s.sender == role) / per_s
        into = sum(s.per_s * nodes[other] / number for s in said if s.sender == other) / per_s
        sent = sum(s.bytes_per_s for s in said if s.sender == role) / per_s
        socket_ms = (out + into) / 2 * codec_us / 1e3
        found[f"{role}: one core of the daemon"] = 1e3 / (core_ms[role] + socket_ms)
        found[f"{role}: 1 % of a 10 Gb/s control network"] = CONTROL_BYTES_PER_S / sent
        payload = fleet.num_tokens // BLOCK_TOKENS * BLOCK_TOKENS * LLAMA_70B_BYTES_PER_TOKEN
        found[f"{role}: 8 x 400 Gb/s of network cards"] = NIC_BYTES_PER_S / payload
    return found
