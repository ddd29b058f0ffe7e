"""The checks of who may register, attach, or have a mover started, and of the exported regions."""

from __future__ import annotations

from kvxferd.core.context import NodeContext
from kvxferd.core.limits.ledger import RateLimiter
from kvxferd.core.limits.table import RANKS
from kvxferd.core.ranks.rank import LocalRank
from kvxferd.core.ranks.registry import Registry
from kvxferd.core.ranks.session import Session
from kvxferd.errors import BusyError, Code, EngineError
from kvxferd.ids import EngineId, EngineKey, Incarnation, RegionId
from kvxferd.layout import RankLayout
from kvxferd.wire.common import Refusal
from kvxferd.wire.limits import MAX_NAME_CHARS
from kvxferd.wire.worker import RegionExport

# A registration, a resume and a mover's end each start a mover, which is a process. Each user may start two
# engines of 64 ranks at once, twice; then a rank each quarter of a second, which is an engine of 64 every
# 16 s.
REGISTER_BURST, REGISTER_PER_S = 256, 4.0


class RegistrationChecks:
    """Raises the refusal of a request. Changes nothing but the number of started movers."""

    def __init__(self, context: NodeContext, registry: Registry) -> None:
        self._context = context
        self._registry = registry
        self.mover_starts = RateLimiter(REGISTER_BURST, REGISTER_PER_S)

    def check_room(self, session: Session) -> None:
        """Raise EngineError where the daemon drains, BusyError where the user has as many ranks as it may."""
        if self._context.draining:
            raise EngineError(
                "cannot register: this daemon is draining; register when it is back", Code.DRAINING
            )
        self._context.ledger[RANKS].check(session.uid, 1, "register")

    def count_mover_start(self, session: Session, what: str) -> None:
        """Count one mover more of the user, last. Raise BusyError where it has had too many started."""
        wait_s = self.mover_starts.acquire(session.uid, self._context.now)
        if wait_s > 0:
            raise BusyError(
                f"cannot {what}: uid {session.uid} has had {REGISTER_BURST} movers started at once, and then "
                f"more than {REGISTER_PER_S:g} a second; try again in {wait_s:.2f} s",
                wait_s,
                "mover_starts",
            )

    def check_owner(self, session: Session, engine_id: EngineId) -> None:
        """Raise EngineError where another user owns the engine."""
        if not self._registry.is_owner(session.uid, engine_id):
            users = ", ".join(map(str, sorted(self._registry.users_of(engine_id))))
            raise EngineError(
                f"cannot be part of engine {engine_id} as uid {session.uid}: its ranks here are, or were "
                f"last, of uid {users}; run it as that user, choose another engine id, or have the operator "
                "disown it",
                Code.NOT_ALLOWED,
            )

    def check_start(self, session: Session, key: EngineKey) -> None:
        """Raise EngineError where it would replace a generation whose ranks are all on other nodes.

        That one has no user here: any local user could end it by another generation. After a restart of this
        daemon it exists only as the ranks that are kept for its members. Called after `check_owner`.
        """
        registry, engine_id = self._registry, key.engine_id
        is_own = session.uid in (0, self._context.settings.own_uid)
        if is_own or registry.get(key) or registry.users_of(engine_id):
            return
        if registry.generations_of(engine_id) or registry.owners.awaits_daemon(engine_id):
            raise EngineError(
                f"cannot register engine {key} as uid {session.uid}: this would replace a generation whose "
                "ranks are all of other nodes; stop it there first, choose another engine id, register this "
                "start as root or as the daemon's user, or, if its nodes are gone, have the operator run "
                f"`kvxferd disown {engine_id}`",
                Code.NOT_ALLOWED,
            )

    def check_publisher(self, session: Session, engine_id: EngineId) -> None:
        """Raise EngineError where no mover of the engine serves this user's fence pages."""
        if not self._registry.may_publish(session.uid, engine_id):
            users = ", ".join(map(str, sorted(self._registry.users_of(engine_id))))
            raise EngineError(
                f"cannot publish for engine {engine_id} as uid {session.uid}: its ranks here are of uid "
                f"{users}, and a mover serves the fence pages of its own user alone; attach as that user",
                Code.NOT_ALLOWED,
            )


def check_problem(problem: Refusal | None) -> None:
    """Raise EngineError for the worker socket's refusal of the message's descriptors."""
    if problem is not None:
        raise EngineError(problem.message, problem.code, retry_after_s=problem.retry_after_s)


def check_is_new(rank: LocalRank, incarnation: Incarnation) -> None:
    """Raise EngineError unless the incarnation is new: resumed memory has none of the published bytes."""
    if incarnation == rank.incarnation or not 0 < len(incarnation) <= MAX_NAME_CHARS:
        raise EngineError(
            f"cannot resume rank {rank.spec.rank} of engine {rank.spec.key} as incarnation "
            f"{incarnation[:80]!r}: give a new random one, of {MAX_NAME_CHARS} characters at most",
            Code.REGION_INVALID,
        )


def check_exports(layout: RankLayout, exports: tuple[RegionExport, ...]) -> None:
    """Raise EngineError unless the layout's regions are exported, each once."""
    wanted = {region.region: region.size_bytes for region in layout.regions}
    given = {export.region: export.size_bytes for export in exports}
    if len(given) != len(exports) or given != wanted:
        raise EngineError(
            f"cannot register: the layout names regions {_format_regions(wanted)}, and "
            f"{_format_regions(given)} were exported; "
            "export each once",
            Code.REGION_INVALID,
        )


def _format_regions(regions: dict[RegionId, int]) -> str:
    """Return the first eight regions as text: a thousand were a message of 380 KB."""
    shown = ", ".join(f"{name[:80]!r}: {size}" for name, size in list(regions.items())[:8])
    return f"{{{shown}}}" if len(regions) <= 8 else f"{{{shown}, ...}} ({len(regions)} of them)"
