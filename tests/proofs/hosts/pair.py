"""A daemon and an engine on each of two hosts, UCX over TCP between them."""

from __future__ import annotations

import itertools
import time
from typing import Any, NamedTuple

import msgspec

from kvxferd.mover.ucx_settings import tls_with_cuda
from tests.support.network_namespaces import DEVICE, Cable
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.rank_process import RankProcess
from tests.support.nodes.requests import TOKENS, spec_of

# Short, so that what ends by itself ends within a test.
FLAGS = (
    *("--transfer-lease-s", "5", "--transfer-max-hold-s", "10", "--peer-silent-after-s", "4"),
    *("--peer-request-timeout-s", "0.5", "--peer-handshake-wait-s", "4", "--drain-limit-s", "3"),
)
# 8 KiB a token, so that a transfer is 4 MiB and takes a while over TCP.
FACTS: dict[str, Any] = {"head_dim": 64, "num_blocks": 6 * 32}
NUM_BYTES = TOKENS * 4 * 2 * 8 * 64 * 2
RECOVER_S = 40.0


class Published(NamedTuple):
    """A request that is published. Its blocks have these ids at either end."""

    request: int
    ids: list[int]
    ref: dict[str, Any]


class Pull(NamedTuple):
    """One that was begun."""

    of: Published
    ticket: int


class Pair:
    """A source near, a sink far."""

    def __init__(self, fleet: Fleet, cable: Cable) -> None:
        self.cable = cable
        self._fleet = fleet
        self._requests = itertools.count(1)
        self._daemons = [self._daemon(0, "near"), self._daemon(1, "far")]
        self.source, self.sink = self._rank(0, "prefill", "HND"), self._rank(1, "decode", "NHD")

    def _daemon(self, index: int, name: str) -> Daemon:
        host = (self.cable.near, self.cable.far)[index]
        environ = {"UCX_TLS": tls_with_cuda("tcp"), "UCX_NET_DEVICES": DEVICE}
        flags = (*FLAGS, "--peer-bind", f"tcp://{host.address}:9441")
        return self._fleet.daemon(name, *flags, prefix=host.prefix, **environ)

    def _rank(self, index: int, name: str, layout: str, generation: str = "g1") -> RankProcess:
        spec = msgspec.structs.replace(spec_of(name), generation=generation)
        return self._fleet.register(self._daemons[index], spec, layout=layout, **FACTS)

    def publish(self) -> Published:
        request = next(self._requests)
        first = request % 6 * 32  # six requests in a row have blocks of their own
        ids = list(range(first, first + 32))
        self.source.write(request, ids, TOKENS)
        return Published(request, ids, self.source.publish(f"req-{request}", ids, TOKENS))

    def pull(self, deadline_s: float, published: Published | None = None) -> Pull:
        """Begin to pull that, or what is published now."""
        made = published or self.publish()
        return Pull(made, self.sink.pull(made.ref, made.ids, TOKENS, deadline_s))

    def outcomes(self, pulls: list[Pull], limit_s: float) -> list[str]:
        """How each ended: "delivered" with the right bytes, or the code of its failure."""
        ends = self.sink.end_of_all([ticket for _, ticket in pulls], limit_s)
        for made, ticket in pulls:
            if ends[ticket][0] == "Delivered":
                assert self.sink.num_wrong(made.request, made.ids, TOKENS) == 0
        return [str(ends[ticket][1].get("code", "delivered")) for _, ticket in pulls]

    def deliver(self) -> None:
        assert self.outcomes([self.pull(20.0)], 25.0) == ["delivered"]

    def deliver_again(self) -> None:
        """Try until one works."""
        began = time.monotonic()
        while self.outcomes([pull := self.pull(4.0)], 15.0) != ["delivered"]:
            assert time.monotonic() < began + RECOVER_S, f"nothing works {RECOVER_S} s later"
            self.source.unpublish(pull.of.ref)

    def replace_source(self) -> None:
        """Another daemon, of another directory, takes the address; the engine starts anew there."""
        self.source.kill()
        self._daemons[0].kill()
        self._daemons[0] = self._daemon(0, "successor")
        self.source = self._rank(0, "prefill", "HND", "g2")
