"""What an attack finds: addresses, keys, and a runner that does what only root or the operator can."""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import signal
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from kvxferd.control.curve_keys import CurveKeyPair
from kvxferd.die_with_parent import die_with_parent
from kvxferd.errors import KvxferdError
from tests.proofs.hostile.raw_protocol import PeerByHand, WorkerByHand
from tests.proofs.hostile.registry import Attack
from tests.proofs.hostile.testbed import Stage
from tests.proofs.hostile.users import HOSTILE, STRANGER

USERS = {"stranger": STRANGER, "peer": STRANGER, "router": STRANGER, "operator": STRANGER}


@dataclass
class Place:
    """One daemon, as an attacker knows it."""

    worker_socket: str
    run_directory: str
    http: tuple[str, int]
    endpoint: str


@dataclass
class Scene:
    """In the attacker's process."""

    places: dict[str, Place]
    key: CurveKeyPair | None
    pipe: Connection
    until: float
    seed: int
    opened: list[Any] = field(default_factory=list)

    @property
    def a(self) -> Place:
        return self.places["a"]

    @property
    def b(self) -> Place:
        return self.places["b"]

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    def send_request(self, request: str, /, **arguments: Any) -> Any:
        """Have the runner do something; returns what came of it."""
        self.pipe.send((request, arguments))
        return self.pipe.recv()

    def honest(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Have the honest pair do something."""
        return self.send_request("honest", do=do, **arguments)

    def honest_ref(self) -> dict[str, Any]:
        """A reference of the honest pair, as soon as its own traffic leaves blocks for one."""
        while (ref := self.honest("publish", source=0)["ref"]) is None and self.left_s > 0:
            self.rest(0.2)
        assert ref is not None, "the honest pair publishes nothing"
        return dict(ref)

    def worker(self, place: Place | None = None, **more: Any) -> WorkerByHand:
        """A connection to a worker socket that has greeted."""
        made = WorkerByHand((place or self.a).worker_socket, **more)
        self.opened.append(made)
        return made

    def peer(self, place: Place | None = None, key: CurveKeyPair | None = None, **more: Any) -> PeerByHand:
        """A connection to a peer socket; with the admitted key where there are keys and none is given."""
        made = PeerByHand((place or self.a).endpoint, key or self.key, **more)
        self.opened.append(made)
        return made

    def rest(self, seconds: float) -> None:
        """Let the daemons work; the honest pair goes on."""
        time.sleep(max(0.0, min(seconds, self.left_s)))


def place_of(stage: Stage, name: str) -> Place:
    node = stage.nodes[name]
    status = node.status_if_any()
    return Place(
        node.worker_socket,
        str(node.directory),
        node.http_address,
        status["endpoint"] if status else "",
    )


def play(stage: Stage, attack: Attack, seed: int, limit_s: float, pipe: Connection) -> None:
    """The attacker's process. Never returns."""
    code = 1
    try:
        os.setsid()
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        places = {name: place_of(stage, name) for name in stage.nodes}
        for module in attack.imports:
            importlib.import_module(module)
        USERS.get(attack.who, HOSTILE).become()
        die_with_parent(os.getppid())
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        scene = Scene(places, stage.key, pipe, time.monotonic() + limit_s, seed)
        try:
            found, note = attack.run(scene) or "", ""
        except (OSError, KvxferdError) as error:
            found, note = "", f"stopped by {type(error).__name__}: {error}"[:200]
        pipe.send(("over", {"found": found, "note": note}))
        code = 0
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send(("broken", {"trace": traceback.format_exc()}))
    finally:
        os._exit(code)
