"""The peer sockets: encoded messages between daemons, which may be lost, doubled, delayed and cut off."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from typing import TYPE_CHECKING

from kvxferd.core import events as ev
from kvxferd.ids import Endpoint, EngineKey
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.common import BlockIds, Message
from kvxferd.wire.peer import LeaveRank, PeerHello, RankPollingRequest, RequestMessage
from tests.property.simulation.daemon import Daemon, message_name
from tests.property.simulation.oracle import Violation
from tests.property.simulation.told import check_left, joined_rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.property.simulation.world import World

LOST, DOUBLED, DELAYED = "lose-message", "double-message", "delay-message"
Link = tuple[str, str]  # from one node to another


class Network:
    """A connection is a route: once it was cut, replies to the old route are lost."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._agenda = world.agenda
        self._rng = rng
        self._last_arrival: dict[Link, float] = {}
        self._connections: defaultdict[tuple[str, str], int] = defaultdict(int)  # of a daemon to a node
        self._last_request: defaultdict[str, int] = defaultdict(int)  # a daemon's highest number
        self._given_up: dict[tuple[str, str], int] = {}  # that number when it gave up a node
        self.tenants: dict[str, str] = {}  # whose daemon answers at another node's address
        self.partitions: defaultdict[Link, int] = defaultdict(int)
        self.planned: defaultdict[Link | None, deque[tuple[str, float, Callable[[], None]]]]
        self.planned = defaultdict(deque)  # None: for the next message, whoever sends it
        self.to_lose: defaultdict[type[Message], deque[Callable[[], None]]] = defaultdict(deque)
        self.spares_parts = False  # a grant without one of its parts is refused, and the engine tries again

    def request(self, sender: Daemon, endpoint: Endpoint, message: Message) -> None:
        """Send over the connection that the sender has opened."""
        target = endpoint.removeprefix("tcp://").removesuffix(":9441")
        self._check_greeting(sender, target, message)
        route = f"{sender.name}/{self._connections[sender.name, target]}/{target}".encode()
        self._post(sender.node_name, target, message, self._request_arrives, (target, route, encode(message)))

    def reply(self, sender: Daemon, route: bytes, message: Message) -> None:
        """Send over a connection that another daemon has opened, if that is still the same."""
        daemon_name, number, target = route.decode().split("/")
        node_name = daemon_name.partition(".")[0]
        arguments = (daemon_name, int(number), target, encode(message))
        self._post(sender.node_name, node_name, message, self._reply_arrives, arguments)

    def reconnect(self, sender: Daemon, endpoint: Endpoint) -> None:
        """The sender has given up its peer, and closed its connection; the next message opens another."""
        target = endpoint.removeprefix("tcp://").removesuffix(":9441")
        self._connections[sender.name, target] += 1
        self._given_up[sender.name, target] = self._last_request[sender.name]

    def _check_greeting(self, sender: Daemon, target: str, message: Message) -> None:
        """Raise Violation where a peer that was given up gets a new request before it is greeted again."""
        if not isinstance(message, RequestMessage):  # a member replies to its home on this connection
            return
        number, link = message.request, (sender.name, target)
        self._last_request[sender.name] = max(number, self._last_request[sender.name])
        if isinstance(message, PeerHello):
            self._given_up.pop(link, None)
        elif number > self._given_up.get(link, number):
            text = f"{sender.name} sends {message_name(message)} to {target}, which it has not greeted again"
            raise Violation("violations", text)

    def forget_plans(self) -> None:
        """Have nothing happen to messages any more that was planned."""
        self.planned.clear()
        self.to_lose.clear()

    def cut(self, daemon: Daemon, target: str) -> None:
        """Break a daemon's connection to a node: it opens another by itself."""
        self._connections[daemon.name, target] += 1

    def _request_arrives(self, target: str, route: bytes, payload: bytes) -> None:
        daemon = self._world.daemons.get(self.tenants.get(target, target))
        if daemon is None:
            return
        message = PEER_MESSAGES.decode(payload)
        if isinstance(message, LeaveRank):
            daemon._run(self._have_left, (daemon, route, message))
        else:
            daemon._run(daemon.feed, (ev.PeerRequest(route, message),))

    @staticmethod
    def _have_left(daemon: Daemon, route: bytes, message: LeaveRank) -> None:
        joined = joined_rank(daemon, EngineKey(message.engine_id, message.generation), message.rank)
        daemon.feed(ev.PeerRequest(route, message))
        check_left(daemon, message, joined)

    def _reply_arrives(self, daemon_name: str, number: int, target: str, payload: bytes) -> None:
        daemon = self._world.daemons.get(daemon_name.partition(".")[0])
        if daemon is None or daemon.name != daemon_name or self._connections[daemon_name, target] != number:
            return
        reply = ev.PeerReply(Endpoint(f"tcp://{target}:9441"), PEER_MESSAGES.decode(payload))
        daemon._run(daemon.feed, (reply,))

    def _post(
        self, source: str, target: str, message: Message, act: Callable[..., None], arguments: tuple
    ) -> None:
        link = (source, target)
        self._agenda.note(f"{source}->{target}", message_name(message))
        self._world.watcher.posted(source, target, message)
        if self.partitions[link]:
            return
        if losses := self.to_lose.get(type(message)):
            losses.popleft()()
            self._agenda.note(f"{source}->{target}", f"{LOST} {message_name(message)}")
            return
        arrival = self._agenda.now + self._rng.choice((0.0002, 0.0005, 0.002))
        is_spared = self.spares_parts and isinstance(message, BlockIds)
        planned = () if is_spared else self.planned[link] or self.planned[None]
        if planned:
            kind, seconds, strike = planned.popleft()
            strike()
            self._agenda.note(f"{source}->{target}", f"{kind} {message_name(message)}")
            if kind == LOST:
                return
            if isinstance(message, RankPollingRequest):
                seconds = 0.0  # of one connection, and there is no later request but over the same one
            if kind == DELAYED and seconds:  # others overtake it
                self._agenda.at(arrival + seconds, act, *arguments)
                return
            if kind == DOUBLED:
                self._agenda.at(arrival + seconds, act, *arguments)
        arrival = max(arrival, self._last_arrival.get(link, 0.0))
        self._last_arrival[link] = arrival
        self._agenda.at(arrival, act, *arguments)
