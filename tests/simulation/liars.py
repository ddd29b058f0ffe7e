"""A node that lies: what its daemon says to others is changed on the way, and its engines are not believed.

It is a node as the others are, whose engines publish for them and read from them. Nobody else may come to
harm: no other pull fails or is wrong, nothing is written but the blocks of a pull of its transfers, those
pulls end in time, and nothing of it is kept once it is gone.
"""

from __future__ import annotations

import random
import shutil
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec

from tests.property.fuzz.draw import Draw
from tests.simulation.engine import Engine, EngineShape
from tests.simulation.history import Heard
from tests.simulation.shapes import ModelFacts, draw_deployment
from tests.simulation.transfers import Wanted

if TYPE_CHECKING:
    from tests.simulation.world import World

NAME = "liar"
EVERY_S = (0.01, 0.05, 0.3)
MAX_CHANGES = 3
OTHER_VERSION, OTHER_VERSION_SHARE = 977, 0.3  # of its hellos, which are refused
NUM_DRAWN_BYTES = 64


class Unchecked:
    """The world as the liar's engines see it: nothing is expected of them, or of what they read."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.expectations = self.reasons = Nothing()
        self.open_pulls: dict[Any, None] = {}
        self.wanted: list[Wanted] = []
        self.heard: defaultdict[str, Heard] = defaultdict(Heard)
        self.unsure_counts: set[str] = set()
        self.planned_in_doubt: list[Any] = []
        self.planned_at_extend: list[Any] = []

    def violate(self, *_: object) -> None:
        """Do nothing: it is told lies about."""

    def pull_started(self) -> None:
        """Do nothing: no fault waits for it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)


class Nothing:
    """Does nothing, whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Liar:
    """The node, with an engine that publishes and one that reads. `share` of its messages are changed."""

    def __init__(self, world: World, rng: random.Random, model: ModelFacts, share: float) -> None:
        self._world, self._rng, self._share = world, rng, share
        self._is_over = False
        unchecked: Any = Unchecked(world)
        self._engines = [self._engine(unchecked, model, name) for name in ("liar-prefill", "liar-decode")]
        for engine in self._engines:
            engine.start()

    def begin(self) -> None:
        """Begin to lie."""
        self._world.network.change = self._change
        self._act()

    def _engine(self, world: Any, model: ModelFacts, name: str) -> Engine:
        rng = self._rng
        deployment = draw_deployment(rng, model, name)
        shape = EngineShape(
            name,
            (NAME,) * len(deployment.ranks),
            is_source=name == "liar-prefill",
            deployment=deployment,
            has_scheduler=rng.random() < 0.5,
            says_ready=rng.random() < 0.4,
            has_gpu=False,
            grows=rng.random() < 0.5,
        )
        return Engine(world, shape)

    def _change(self, sender: str, payload: bytes) -> bytes:
        """Return what of a message arrives."""
        if self._is_over or sender != self._world.host_of(NAME):
            return payload
        tree = msgspec.msgpack.decode(payload)
        if tree["t"] == "PeerHello" and self._rng.random() < OTHER_VERSION_SHARE:
            return msgspec.msgpack.encode(tree | {"versions": (OTHER_VERSION, OTHER_VERSION)})
        if self._rng.random() >= self._share:
            return payload
        draw = Draw(self._rng.randbytes(NUM_DRAWN_BYTES))
        for _ in range(self._rng.randint(1, MAX_CHANGES)):
            tree = draw.mutated(tree)
        return msgspec.msgpack.encode(tree)

    def _act(self) -> None:
        """Have somebody read from it, or let it read from somebody."""
        if self._is_over:
            return
        world, rng = self._world, self._rng
        source, sink = self._engines
        if rng.random() < 0.6:
            reader = rng.choice(world.sinks)
            if (transfer := source.publish(1)) is not None:
                transfer.is_of_liar = True
                reader.pull(transfer)
        elif (transfer := rng.choice(world.sources).publish(1)) is not None:
            transfer.is_of_liar = True
            sink.pull(transfer)
        world.after(rng.choice(EVERY_S), self._act)

    def end(self) -> None:
        """It is gone with all that runs there."""
        self._is_over = True
        for engine in self._engines:
            engine.die()
        for process in self._world.processes_of(NAME):
            self._world.kernel.kill(process)
        shutil.rmtree(self._world.directory / NAME)
