"""A real core behind the real operator's interface, in a simulation of two hosts: no process is started."""

from __future__ import annotations

from typing import Any

from kvxferd.config import Config
from kvxferd.control.node_admin import NodeAdmin
from kvxferd.control.node_api import ReloadResult
from kvxferd.mover.supervisor.pool import PoolStatus
from kvxferd.telemetry.history import History
from tests.support import simulation


class _Pool:
    """Of a mover pool what readiness asks for."""

    def status(self) -> PoolStatus:
        """Ready, with movers of a library."""
        return PoolStatus(1, 0, 1, "simulated", "")


def real_node() -> Any:
    """Return the node of the host that pulls: an engine, a peer, a publish of its own, and a pull that runs.

    One pull has ended, so that its history holds a record of each kind that such a node makes.
    """
    world = simulation.World()
    ids, sink_ids, num_tokens = simulation.IDS, simulation.SINK_IDS, simulation.TOKENS
    (source,) = world.engine(world.host("p"), "prefill")
    host = world.host("d")
    (sink,) = world.engine(host, "decode")
    source.fill(ids, num_tokens, seed=1)
    references = [source.publish(name, ids, num_tokens) for name in ("req-1", "req-2")]
    for name in ("req-1", "req-2"):
        source.say(simulation.wk.Ready(transfer_id=name))
    sink.pull(references[0], sink_ids, num_tokens)
    world.deliver()
    simulation.mover_of(sink).hold = True
    sink.pull(references[1], sink_ids, num_tokens)
    world.deliver()
    sink.publish("req-3", ids, num_tokens)
    world.deliver()
    history = History(boot="boot-a")
    for record in host.records:
        history.add(record)
    return NodeAdmin(
        Config(),
        host.node,
        _Pool(),  # type: ignore[arg-type]
        history,
        lambda event: world.feed(host, event),
        lambda: None,
        lambda: ReloadResult(changed=[], ignored=[], dropped_peers=[], closed_sessions=0),
    )
