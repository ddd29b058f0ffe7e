"""What an operator or an accident does, and must not cost more than it must."""

from __future__ import annotations

import select
import time

from kvxferd import client
from kvxferd.tooling import content
from tests.proofs.hostile.attacker import Scene
from tests.proofs.hostile.attacks.ownership import RESTART, back
from tests.proofs.hostile.honest_pair import TOKENS, Engine, _blocks, _held, spec_of
from tests.proofs.hostile.registry import attack


@attack("worker", limit_s=80.0, allows_failed_pulls=RESTART)
def a_rank_that_sleeps_while_its_daemon_is_away(scene: Scene) -> str:
    """A scheduler published; the daemon dies; the rank is suspended, its memory used for other things, and it
    resumes: what was published before must not be delivered."""
    spec = spec_of("sleeper")
    source = Engine(scene.a.worker_socket, spec)
    sink = Engine(scene.b.worker_socket, spec_of("sleeper-reader"))
    scheduler = client.connect(scene.a.worker_socket, name="scheduler")
    publisher = scheduler.attach("sleeper", "g1")
    ids = list(range(8))
    content.write(source.bytes, source.layout, _held(77, ids))
    ref = publisher.publish("before", _blocks(ids), TOKENS, lease_s=60.0).to_dict()
    scene.rest(0.5)
    scene.send_request("kill", node="a")
    scene.rest(0.3)
    source.rank.suspend()
    if not _await(source.rank, client.Suspended, 15.0):
        return "the rank was never suspended"
    source.bytes[:] = content.background(source.bytes.size)
    if problem := scene.send_request("restart", node="a"):
        return problem
    source.rank.resume(source.regions)
    scene.rest(1.5)
    sink.rank.pull(ref, _blocks(ids), TOKENS, 6.0)
    event = _await(sink.rank, (client.Delivered, client.Failed), 10.0)
    if isinstance(event, client.Delivered):
        return f"delivered: {sink.num_wrong(77, ids)} items wrong"
    if event is None:
        return "the pull never ended"
    for one in (source.client, sink.client, scheduler):
        one.close()
    return back(scene)


def _await(rank: client.RankHandle, kind: object, limit_s: float) -> client.Event | None:
    until = time.monotonic() + limit_s
    while (left := until - time.monotonic()) > 0:
        select.select([rank], [], [], left)
        for event in rank.poll():
            if isinstance(event, kind):  # type: ignore[arg-type]
                return event
    return None
