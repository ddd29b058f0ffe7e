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


@dataclass(frozen=True)
class Setup:
    """How the daemons are started. Attacks of one setup share a stage."""

    keys: bool = True
    flags: tuple[str, ...] = ()  # for both daemons
    num_fds: int = 0  # RLIMIT_NOFILE of the daemons; 0: as it is
    mute_resolver: bool = False  # a name server that never answers


@dataclass(frozen=True)
class Attack:
    """`run` is called in a process of the attacker's user. It returns what it achieved, "" for nothing."""

    name: str
    about: str
    who: str
    run: Callable[[Scene], str | None]
    setup: Setup = Setup()
    limit_s: float = 30.0
    allows_failed_pulls: str = ""  # why, where the honest pair may lose some
    fds_slack: int = 16
    imports: tuple[str, ...] = ()  # before the attacker's process becomes somebody else
    fresh: bool = False  # wants a stage that nothing has happened on, as memory is compared

    def __post_init__(self) -> None:
        assert self.who in WHO


_ATTACKS: dict[str, Attack] = {}


def attack(who: str, **more: object) -> Callable[[Callable[[Scene], str | None]], Attack]:
    """Register a function as an attack. Its name is the attack's, its docstring what it is about."""

    def registered(run: Callable[[Scene], str | None]) -> Attack:
        name = run.__name__.replace("_", "-")
        about = " ".join((run.__doc__ or "").split())
        made = Attack(name, about, who, run, **more)  # type: ignore[arg-type]
        assert name not in _ATTACKS, name
        _ATTACKS[name] = made
        return made

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
