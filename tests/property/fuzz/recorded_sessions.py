"""What nodes heard while real transfers ran: the sequences that fuzzing departs from."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import msgspec

from kvxferd.core import Settings
from kvxferd.core import events as ev
from kvxferd.wire import worker as wk
from tests.support.simulation import Host, World, spec_of

SETTINGS = Settings()
IDS, SINK_IDS, TOKENS = [3, 1, 2], [7, 9, 4], 11


@dataclass(frozen=True)
class Tape:
    """All that one node heard, when, and the tokens that it drew."""

    boot: str
    endpoint: str
    heard: tuple[tuple[ev.Event, float], ...]
    tokens: tuple[str, ...]


class _Recording(World):
    """A world that writes down what every node hears."""

    def __init__(self) -> None:
        super().__init__(0, SETTINGS)
        self.heard: dict[str, list[tuple[ev.Event, float]]] = {}
        self.tokens: dict[str, list[str]] = {}

    def host(self, name: str) -> Host:
        host = super().host(name)
        drawn = self.tokens.setdefault(name, [])
        new_token = host.node.context.new_token

        def noted() -> str:
            drawn.append(new_token())
            return drawn[-1]

        host.node.context.new_token = noted
        return host

    def feed(self, host: Host, event: ev.Event) -> None:
        self.heard.setdefault(host.name, []).append((event, self.now))
        super().feed(host, event)

    def tapes(self) -> list[Tape]:
        return [
            Tape(host.node.context.boot, host.endpoint, tuple(self.heard[name]), tuple(self.tokens[name]))
            for name, host in self.hosts.items()
        ]


@functools.cache
def tapes() -> tuple[Tape, ...]:
    """The nodes of a pair of engines, and those of an engine that spans nodes with its reader."""
    return (*_pair(), *_spread())


def _pair() -> list[Tape]:
    world = _Recording()
    source = world.engine(world.host("p"), "prefill")[0]
    sink = world.engine(world.host("d"), "decode", "NHD")[0]
    ref = source.publish("t1", IDS, TOKENS)
    sink.say(wk.Prepare(ref=ref))
    sink.pull(ref, SINK_IDS, TOKENS)
    mover = next(iter(world.hosts["d"].movers.values()))
    mover.hold = True
    ticket = sink.pull(source.publish("t2", IDS, TOKENS), SINK_IDS, TOKENS)
    world.advance(1.5)
    sink.say(wk.Cancel(ticket=ticket))
    source.say(wk.Unpublish(transfer_id="t2"))
    mover.copy()
    mover.finish()
    third = source.publish("t3", IDS, TOKENS, lease_s=4.0)
    sink.pull(third, SINK_IDS, TOKENS, deadline_s=1.0)
    world.advance(3.0)
    sink.say(wk.Abandon(ref=third))
    source.say(wk.Suspend())
    world.advance(1.0)
    return world.tapes()


def _spread() -> list[Tape]:
    world = _Recording()
    home, other = world.host("p0"), world.host("p1")
    spec = spec_of("spread", pp=2, layers=4, home=home.endpoint)
    first = world.register(home, spec)
    second = world.register(other, msgspec.structs.replace(spec, pp_rank=1))
    sink = world.engine(world.host("d"), "decode", layers=4)[0]
    ref = first.publish("t1", IDS, TOKENS)
    second.ready("t1")
    sink.pull(ref, SINK_IDS, TOKENS)
    world.advance(4.0)
    second.close()
    world.advance(1.0)
    return world.tapes()
