"""A real core behind the real operator's interface, in a simulation of two hosts: no process is started."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from kvxferd.config import Config
from kvxferd.control.node_admin import NodeAdmin
from kvxferd.control.node_api import ReloadResult
from kvxferd.mover.supervisor.pool import PoolStatus
from kvxferd.telemetry.history import History

SIMULATION = Path(__file__).parents[1] / "core" / "world.py"


class _Pool:
    """Of a mover pool what readiness asks for."""

    def status(self) -> PoolStatus:
        """Ready, with movers of a library."""
        return PoolStatus(1, 0, 1, "simulated", "")


def real_node() -> Any:
    """Return the node of the host that pulls: an engine, a peer, a publish of its own, and a pull that runs.

    One pull has ended, so that its history holds a record of each kind that such a node makes.
    """
    world_module = _simulation()
    world = world_module.World()
    ids, sink_ids, num_tokens = world_module.IDS, world_module.SINK_IDS, world_module.TOKENS
    (source,) = world.engine(world.host("p"), "prefill")
    host = world.host("d")
    (sink,) = world.engine(host, "decode")
    source.fill(ids, num_tokens, seed=1)
    references = [source.publish(name, ids, num_tokens) for name in ("req-1", "req-2")]
    for name in ("req-1", "req-2"):
        source.say(world_module.wk.Ready(transfer_id=name))
    sink.pull(references[0], sink_ids, num_tokens)
    world.deliver()
    world_module.mover_of(sink).hold = True
    sink.pull(references[1], sink_ids, num_tokens)
    world.deliver()
    sink.publish("req-3", ids, num_tokens)
    world.deliver()
    history = History()
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


def _simulation() -> ModuleType:
    """Return the simulation of the core's tests, which stands in no package."""
    name = "world"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SIMULATION)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
