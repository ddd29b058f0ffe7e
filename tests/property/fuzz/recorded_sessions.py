"""What nodes heard while real transfers ran: the sequences that fuzzing departs from."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from msgspec.structs import replace

from kvxferd.core import Settings
from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.errors import Code
from kvxferd.layout import PackedBlocks, pack_ids
from kvxferd.wire import mover as mv
from kvxferd.wire import worker as wk
from kvxferd.wire.common import BlockIds, Refusal
from tests.support.simulation import Host, World, mover_of, spec_of

SETTINGS = Settings()
IDS, SINK_IDS, TOKENS = [3, 1, 2], [7, 9, 4], 11


@dataclass(frozen=True)
class Tape:
    """All that one node heard, when, and the tokens that it drew."""

    boot: str
    endpoint: str
    received: tuple[tuple[ev.Event, float], ...]
    tokens: tuple[str, ...]


class _RecordedHost(Host):
    """A host that writes down what its node hears, and the tokens that it draws."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.received: list[tuple[ev.Event, float]] = []
        self.tokens: list[str] = []
        new_token = self.node.context.new_token

        def noted() -> str:
            self.tokens.append(new_token())
            return self.tokens[-1]

        self.node.context.new_token = noted

    def decide(self, event: ev.Event) -> list[fx.Effect]:
        self.received.append((event, self.now()))
        return super().decide(event)


class _Recording(World):
    """A world that writes down what every node hears."""

    host_type = _RecordedHost

    def __init__(self) -> None:
        super().__init__(0, SETTINGS)

    def tapes(self) -> list[Tape]:
        return [
            Tape(host.node.context.boot, host.endpoint, tuple(host.received), tuple(host.tokens))
            for host in self.hosts.values()
        ]


@functools.cache
def tapes() -> tuple[Tape, ...]:
    """The nodes of a pair of engines, of one that grows and sleeps, and of one that spans nodes."""
    return (*_pair(), *_grown(), *_spread())


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


def _grown() -> list[Tape]:
    """A transfer that grows, and ids in parts; movers that die or were never there; ranks that sleep."""
    world = _Recording()
    world.receives_deliveries = True
    source = world.engine(world.host("p"), "prefill", tp=2)[0]
    other = source.host.workers[max(source.host.workers)]
    sink = world.engine(world.host("d"), "decode")[0]
    scheduler = world.attach(source.host, source.spec)
    source.say(BlockIds(stream=1, group="full", offset=0, ids=pack_ids(IDS[:1])))
    ref = source.publish("t1", IDS[1:2], TOKENS, ready_tokens=4, stream=1)
    blocks = {"full": PackedBlocks(pack_ids(SINK_IDS))}
    pull = wk.PullRequest(
        ticket=9, ref=ref, blocks=blocks, num_tokens=TOKENS, deadline_s=9.0, progressive=True,
    )  # fmt: skip
    sink.say(pull)
    other.ready("t1", 8)
    more = {"full": PackedBlocks(pack_ids(IDS[2:]))}
    source.say(wk.Ready(transfer_id="t1", blocks=more, incarnation=source.incarnation, ready_tokens=-1))
    mover = mover_of(sink)
    mover.say(mv.ChunkMemoryRequest(num_wanted=1 << 30))
    mover.hold = True
    other.ready("t1")
    sink.say(wk.DeliveredByMover(tickets=(77,)))
    mover.die()
    world.advance(2.0)
    for worker in (sink, other):
        worker.say(wk.Suspend())
        worker.host.give_movers = worker is other
        worker.resume()
    sink.host.feed(ev.MoverNotStarted(max(sink.host.movers), Refusal(Code.MOVER_LOST, "none")))
    sink.say(wk.NewMover())
    world.cut = {("d", "p")}
    sink.say(wk.Prepare(ref=replace(ref, transfer_id="t2")))
    world.advance(3.0)
    scheduler.close()
    return world.tapes()


def _spread() -> list[Tape]:
    world = _Recording()
    home, other = world.host("p0"), world.host("p1")
    spec = spec_of("spread", pp=2, layers=4, home=home.endpoint)
    first = world.register(home, spec)
    second = world.register(other, replace(spec, pp_rank=1))
    sink = world.engine(world.host("d"), "decode", layers=4)[0]
    ref = first.publish("t1", IDS, TOKENS)
    second.ready("t1")
    sink.pull(ref, SINK_IDS, TOKENS)
    world.advance(4.0)
    second.close()
    world.advance(1.0)
    return world.tapes()
