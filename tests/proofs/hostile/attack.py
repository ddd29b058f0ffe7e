"""What an attack is, who makes it, what it finds, and the process in which it runs."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import pkgutil
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from kvxferd.control.curve_keys import CurveKeyPair
from kvxferd.die_with_parent import die_with_parent
from kvxferd.errors import Code, KvxferdError
from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.memory import SealedMemory
from kvxferd.tooling.child_process import ChildError
from tests.proofs.hostile.stage import Node, Stage
from tests.proofs.hostile.users import HOSTILE, ROOT, STRANGER
from tests.support.nodes.rank_process import RankProcess
from tests.support.nodes.requests import TOKENS, ids_for, publish, pull_and_check
from tests.support.raw_peer import PeerByHand
from tests.support.raw_worker import RawWorker

# Who attacks. A stranger has no permission on the worker socket and no key; a user may connect; a worker
# has a registered rank of its own; a router hands out references; a peer has a key that the daemons admit.
WHO = {
    **dict.fromkeys(("stranger", "peer", "router"), STRANGER),
    **dict.fromkeys(("user", "worker"), HOSTILE),
    "root": ROOT,
}
# Whoever has neither a registered rank nor an admitted key may cost the daemon no more than 100 MB.
OUTSIDERS = ("stranger", "user", "router")
NEWCOMER_S = 15.0  # to start


# Of the ranks that attackers register.
FACTS: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 16, "block_tokens": 16, "num_blocks": 16}


class WorkerByHand(RawWorker):
    """A connection to a worker socket that says whatever an attack wants."""

    def be_rank(self, name: str, memory: SealedMemory | None = None, **more: Any) -> Any:
        """Be the one rank of an engine of that name. Returns the answer; `more`: as of `register`."""
        spec = EngineSpec(engine_id=name, generation="g1", num_layers=2, num_kv_heads=2)
        layout = attention_layout(spec=spec, **FACTS)
        if memory is not None:
            return self.register(spec, layout, memory.fd, **more)
        with SealedMemory.create(layout.regions[0].size_bytes, "by-hand") as own:
            return self.register(spec, layout, own.fd, **more)


@dataclass
class Scene:
    """In the attacker's process. What only others may ask a daemon was asked before it became who it is."""

    stage: Stage
    until: float
    seed: int
    status: dict[str, Any]  # of daemon a
    opened: list[Any] = field(default_factory=list)
    _requests: Iterator[int] = field(default_factory=lambda: itertools.count(2))

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

    # --- what it may have honest engines do

    @cached_property
    def source(self) -> RankProcess:
        """An honest engine at the first daemon."""
        return self.stage.register(self.stage.spares[0], "a", self.name, NEWCOMER_S)

    @cached_property
    def reader(self) -> RankProcess:
        """An honest engine at the other one."""
        return self.stage.register(self.stage.spares[1], "b", f"{self.name}-reader", NEWCOMER_S)

    @property
    def name(self) -> str:
        """Of the source's engine: no other attack's has it."""
        return f"late-{os.getpid()}"

    def pull(self, ref: Any, deadline_s: float = 5.0, limit_s: float = 40.0) -> tuple[str, str]:
        """Have the reader pull what a router brought; how it ended, and more of that.

        "delivered", "failed", "refused", "hung", or "broken" where the client raises what no engine expects.
        """
        try:
            ticket = self.reader.pull(ref, ids_for(1), TOKENS, deadline_s)
        except ChildError as error:
            return ("broken" if error.code is Code.INTERNAL else "refused"), error.message
        until = time.monotonic() + limit_s
        while (event := self.reader.next_event(max(0.0, until - time.monotonic()))) is not None:
            name, fields = event
            if name in ("Delivered", "Failed") and fields["ticket"] == ticket:
                return name.lower(), str(fields)
        return "hung", f"it did not end in {limit_s} s"

    def newcomer(self) -> str:
        """Why no honest engine can start at the first daemon and be read at the other; "" where one can."""
        try:
            number = next(self._requests)
            pull_and_check([self.reader], publish([self.source], number), number)
        except (ChildError, AssertionError) as error:
            return f"an honest engine cannot start, or be read: {error}"
        return ""

    def worker(self, node: Node | None = None, **more: Any) -> WorkerByHand:
        """A connection to a worker socket that has greeted."""
        made = WorkerByHand((node or self.a).worker_socket, **more)
        self.opened.append(made)
        return made

    def peer(self, node: Node | None = None) -> PeerByHand:
        """A connection to a peer socket, with the admitted key where there are keys."""
        made = PeerByHand((node or self.a).endpoint, self.key)
        self.opened.append(made)
        return made

    def rest(self, seconds: float) -> None:
        """Let the daemons work; the honest engines go on."""
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
        for module in ("encodings.idna", *attack.imports):  # which `getaddrinfo` imports late
            importlib.import_module(module)
        node = stage.nodes["a"]
        until = time.monotonic() + attack.limit_s
        scene = Scene(stage, until, seed, node.status())
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
