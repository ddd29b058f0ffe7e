"""Workers of the simulation that belong to users."""

from __future__ import annotations

from kvxferd.core import events as ev
from kvxferd.ids import SessionId
from kvxferd.wire import worker as wk
from tests.support.simulation import World


def connect_as(world: World, host, uid: int):
    worker = world.connect(host)
    worker.close()
    again = SessionId(worker.session + 1000)
    host.workers[again] = worker
    worker.session, worker.connected = again, True
    world.feed(host, ev.WorkerConnected(again, 1, uid))
    worker.say(wk.Hello(versions=wk.WORKER_VERSIONS, client="test"))
    return worker


def register_as(world: World, host, uid: int, spec):
    model = world.register(world.host("elsewhere"), spec)
    worker = connect_as(world, host, uid)
    worker.spec, worker.layout, worker.memory = spec, model.layout, model.memory
    world.register_again(worker)
    return worker
