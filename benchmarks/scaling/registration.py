"""What a remote engine costs a daemon's registry: one local rank by itself, and a whole node.

`registration.py NUMBER` prints one measurement, of the kvxferd that it imports, as JSON.
`scale.py --beside` starts it with each checkout's code in turn, also that of before `TransferTopology` was
the registry.
"""

from __future__ import annotations

import gc
import inspect
import json
import sys
import time
import tracemalloc
from dataclasses import dataclass

import msgspec

from kvxferd.core import remote_engines
from kvxferd.core.context import NodeContext
from kvxferd.core.registry import LocalRank
from kvxferd.core.remote_engines import RemoteEngine, RemoteEngineRegistry
from kvxferd.core.settings import Settings
from kvxferd.ids import BootId, Endpoint, Incarnation, Rank, SessionId
from kvxferd.plan import topology
from scaling import control_plane
from scaling.engines import LARGE, NODE, DeploymentShape, manifest, renamed

HYBRID = DeploymentShape(tp=4, model="nemotron-h-8b")
REPEATS = 5  # the shortest is taken


@dataclass(frozen=True)
class RegistrationResult:
    """What one engine costs one local rank, in the mean over many."""

    first_us: float  # registration of an engine that is new
    again_us: float  # of one whose manifest was fetched again: its memory was mapped anew
    use_us: float  # of one that is registered: every pull
    kept_bytes: float  # manifests and plans are shared, and are not counted


class _OneRank:
    """A local rank's registry, in a node without peers."""

    def __init__(self, local: DeploymentShape) -> None:
        endpoint = Endpoint("tcp://here:9441")
        self._context = NodeContext(
            boot=BootId("here"), endpoint=endpoint, settings=Settings(), new_token=lambda: "0" * 32
        )
        spec, layout = local.ranks("local")[0]
        self._rank = LocalRank(SessionId(1), spec, layout, (), Incarnation("i"), 0)
        self._engines = RemoteEngineRegistry(self._context)
        self._by_home = "home" in inspect.signature(RemoteEngineRegistry.plan).parameters

    def plan_all(self, remotes: list[RemoteEngine]) -> float:
        """Register every engine, or use it; return the seconds."""
        began = time.thread_time()
        for remote in remotes:
            if self._by_home:
                self._engines.plan(self._rank, remote.spec.home, remote)
            else:
                self._engines.plan(self._rank, remote)  # type: ignore[call-arg, arg-type]
        taken = time.thread_time() - began
        self._context.pop_effects()
        return taken


def remote_engines_of(shape: DeploymentShape, number: int) -> list[RemoteEngine]:
    """Return engines that are deployed alike: their layouts are the same objects, as a daemon keeps them."""
    template = manifest(shape, "template")
    found = []
    for index in range(number):
        name, home = f"remote-{index}", f"tcp://far-{index}:9441"
        ranks = {
            one.rank: msgspec.structs.replace(one, spec=renamed(one.spec, name, home)) for one in template
        }
        found.append(RemoteEngine(ranks[Rank(0, 0)].spec, ranks))
    return found


def measure(local: DeploymentShape, shape: DeploymentShape, num_engines: int) -> RegistrationResult:
    """Register `num_engines` engines with one rank, without the limit of their number."""
    for module in (remote_engines, topology):
        if hasattr(module, "MAX_REMOTE_ENGINES"):
            module.MAX_REMOTE_ENGINES = num_engines + 1  # type: ignore[attr-defined]
    if hasattr(topology, "MAX_KEPT_PARTS"):
        topology.MAX_KEPT_PARTS = 1 << 40
    fetched, fetched_again = (remote_engines_of(shape, num_engines) for _ in range(2))
    first, again, use = [], [], []
    for _ in range(REPEATS):
        one = _OneRank(local)
        one.plan_all(fetched[:1])  # the plan is made once
        first.append(one.plan_all(fetched[1:]))
        use.append(one.plan_all(fetched))
        again.append(one.plan_all(fetched_again))
    one = _OneRank(local)
    one.plan_all(fetched[:1])
    gc.collect()
    tracemalloc.start()
    one.plan_all(fetched[1:])
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return RegistrationResult(
        1e6 * min(first) / (num_engines - 1),
        1e6 * min(again) / num_engines,
        1e6 * min(use) / num_engines,
        kept / (num_engines - 1),
    )


def main() -> None:
    """Measure as many engines as the argument has, and print JSON."""
    num_engines = int(sys.argv[1])
    found: dict[str, float] = {}
    for name, local, shape in (
        ("64 ranks in 4 stages", NODE, LARGE),
        ("a hybrid of 4 ranks", HYBRID, HYBRID),
    ):
        one = measure(local, shape, num_engines)
        found |= {
            f"{name}: first registration, us": one.first_us,
            f"{name}: a new manifest, us": one.again_us,
            f"{name}: a use, us": one.use_us,
            f"{name}: kept, bytes": one.kept_bytes,
        }
    node = control_plane.measure(control_plane.Load(num_engines, seconds=0.5))
    found["node of 8 ranks: learn an engine, ms"] = node.learn_ms
    found["node of 8 ranks: kept for an engine, KiB"] = node.learn_kib
    print(json.dumps(found))


if __name__ == "__main__":
    main()
