"""What an attack is, who makes it, what it finds, and the process in which it runs."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import resource
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from kvxferd.control.curve_keys import CurveKeyPair
from kvxferd.die_with_parent import die_with_parent
from kvxferd.errors import KvxferdError
from kvxferd.tooling.child_process import ChildError
from tests.proofs.hostile.raw_protocol import PeerByHand, WorkerByHand
from tests.proofs.hostile.stage import Node, Stage
from tests.proofs.hostile.users import HOSTILE, ROOT, STRANGER
from tests.support.nodes.processes import descendants

# Who attacks. A stranger has no permission on the worker socket and no key; a user may connect; a worker
# has a registered rank of its own; a router hands out references; a peer has a key that the daemons admit.
WHO = {
    **dict.fromkeys(("stranger", "peer", "router"), STRANGER),
    **dict.fromkeys(("user", "worker"), HOSTILE),
    "root": ROOT,
}
# Whoever has neither a registered rank nor an admitted key may cost the daemon no more than 100 MB.
OUTSIDERS = ("stranger", "user", "router")


@dataclass
class Scene:
    """In the attacker's process. What only others may ask a daemon was asked before it became who it is."""

    stage: Stage
    until: float
    seed: int
    status: dict[str, Any]  # of daemon a
    pids: list[int]  # daemon a's, and its family's
    opened: list[Any] = field(default_factory=list)

    @property
    def a(self) -> Node:
        return self.stage.nodes["a"]

    @property
    def b(self) -> Node:
        return self.stage.nodes["b"]

    @property
    def key(self) -> CurveKeyPair | None:
        return self.stage.key

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    def honest(self, do: str, **arguments: Any) -> Any:
        """Have the honest pair do something."""
        try:
            return self.stage.honest(do, **arguments)
        except ChildError as error:
            raise AssertionError(f"the honest pair cannot {do}") from error

    def honest_ref(self) -> dict[str, Any]:
        """A reference of the honest pair, as soon as its own traffic leaves blocks for one."""
        while (ref := self.honest("publish", source=0)["ref"]) is None and self.left_s > 0:
            self.rest(0.2)
        assert ref is not None, "the honest pair publishes nothing"
        return dict(ref)

    def worker(self, node: Node | None = None, **more: Any) -> WorkerByHand:
        """A connection to a worker socket that has greeted."""
        made = WorkerByHand((node or self.a).worker_socket, **more)
        self.opened.append(made)
        return made

    def peer(self, node: Node | None = None, key: CurveKeyPair | None = None, **more: Any) -> PeerByHand:
        """A connection to a peer socket; with the admitted key where there are keys and none is given."""
        made = PeerByHand((node or self.a).endpoint, key or self.key, **more)
        self.opened.append(made)
        return made

    def rest(self, seconds: float) -> None:
        """Let the daemons work; the honest pair goes on."""
        time.sleep(max(0.0, min(seconds, self.left_s)))


class Attack(NamedTuple):
    """`run` is called in a process of the attacker's user. It returns what it achieved, "" for nothing."""

    name: str
    about: str
    who: str
    run: Callable[[Scene], str]
    keys: bool = True  # of the daemons, which are started anew where the attack before had it otherwise
    limit_s: float = 30.0
    imports: tuple[str, ...] = ()  # before the attacker's process becomes somebody else
    fresh: bool = False  # wants a stage that nothing has happened on, as memory is compared


_ATTACKS: dict[str, Attack] = {}


def attack(*whos: str, **more: Any) -> Callable[[Callable[[Scene], str]], Callable[[Scene], str]]:
    """Register a function as an attack of each of these. Its docstring is what the attack is about.

    The attack's name is the function's; with several attackers each one's is behind it.
    """

    def registered(run: Callable[[Scene], str]) -> Callable[[Scene], str]:
        about = " ".join((run.__doc__ or "").split())
        for who in whos:
            name = run.__name__.replace("_", "-") + (f"-{who}" if len(whos) > 1 else "")
            assert who in WHO
            assert name not in _ATTACKS, name
            _ATTACKS[name] = Attack(name, about, who, run, **more)
        return run

    return registered


def attacks() -> dict[str, Attack]:
    """All of them, by name."""
    package = importlib.import_module("tests.proofs.hostile.attacks")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"tests.proofs.hostile.attacks.{module.name}")
    return dict(_ATTACKS)


def play(stage: Stage, attack: Attack, seed: int, said: Connection) -> None:
    """Be the attacker's process, which says (what it found, a note, why it is broken). Never returns."""
    found = note = trace = ""
    try:
        os.setsid()
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        for module in attack.imports:
            importlib.import_module(module)
        node = stage.nodes["a"]
        until = time.monotonic() + attack.limit_s
        scene = Scene(stage, until, seed, node.status(), [node.pid, *descendants(node.pid)])
        WHO[attack.who].become()
        die_with_parent(os.getppid())
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        try:
            found = attack.run(scene)
        except (OSError, KvxferdError) as error:
            note = f"stopped by {type(error).__name__}: {error}"[:200]
    except BaseException:
        trace = traceback.format_exc()[-1500:]
    finally:
        with contextlib.suppress(OSError):
            said.send((found, note, trace))
        os._exit(0)
