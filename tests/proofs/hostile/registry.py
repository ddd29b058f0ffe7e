"""What an attack is, who makes it, and what it may cost."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.proofs.hostile.attacker import Scene

# Who attacks. A stranger has no permission on the worker socket and no key; a user may connect; a worker
# has a registered rank of its own; a router hands out references; a peer has a key that the daemons admit.
WHO = ("stranger", "user", "worker", "peer", "router", "operator")
# Whoever has neither a registered rank nor an admitted key may cost the daemon no more than 100 MB.
OUTSIDERS = ("stranger", "user", "router")
MAX_EXTRA_MB = 100.0
MAX_TURN_MS = 100.0
FDS_SLACK = 32  # descriptors that may be open afterwards, and were not before: of eight peers that are known


Run = Callable[["Scene"], "str | None"]


@dataclass(frozen=True)
class Attack:
    """`run` is called in a process of the attacker's user. It returns what it achieved, "" for nothing."""

    name: str
    about: str
    who: str
    run: Run
    keys: bool = True  # of the daemons, which are started anew where the attack before had it otherwise
    limit_s: float = 30.0
    imports: tuple[str, ...] = ()  # before the attacker's process becomes somebody else
    fresh: bool = False  # wants a stage that nothing has happened on, as memory is compared

    def __post_init__(self) -> None:
        assert self.who in WHO


_ATTACKS: dict[str, Attack] = {}


def attack(*whos: str, **more: object) -> Callable[[Run], Run]:
    """Register a function as an attack of each of these. Its docstring is what the attack is about.

    The attack's name is the function's; with several attackers each one's is behind it.
    """

    def registered(run: Run) -> Run:
        about = " ".join((run.__doc__ or "").split())
        for who in whos:
            name = run.__name__.replace("_", "-") + (f"-{who}" if len(whos) > 1 else "")
            assert name not in _ATTACKS, name
            _ATTACKS[name] = Attack(name, about, who, run, **more)  # type: ignore[arg-type]
        return run

    return registered


def attacks() -> dict[str, Attack]:
    """All of them, by name."""
    package = importlib.import_module("tests.proofs.hostile.attacks")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"tests.proofs.hostile.attacks.{module.name}")
    return dict(_ATTACKS)


@dataclass
class Outcome:
    """How one attack went."""

    attack: Attack
    elapsed_s: float = 0.0
    turn_ms: float = 0.0
    extra_mb: float = 0.0
    fds: int = 0  # most open above idle
    fds_left: int = 0
    honest: int = 0
    failed: int = 0
    wrong: int = 0
    slowest_ms: float = 0.0
    note: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def survived(self) -> bool:
        return not self.problems
