"""The sink's access to a transfer: the engine learnt, the reads planned, the grant taken and renewed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kvxferd.core.kept_ids import KeptIds, kept_bytes
from kvxferd.core.moment import Moment
from kvxferd.core.movers import Movers
from kvxferd.core.peers import Peers, RemoteEngine
from kvxferd.core.planning import Planning
from kvxferd.core.questions import CHECK_PEER
from kvxferd.core.registry import LocalRank
from kvxferd.errors import BusyError, Code, KvxferdError, PeerError
from kvxferd.ids import Endpoint, GrantId
from kvxferd.plan import Plan
from kvxferd.wire.common import Binding, Refusal, TransferRef
from kvxferd.wire.endpoint import address_of
from kvxferd.wire.limits import FENCE_WORD_BYTES, MAX_GRANTS_PER_RENEWAL, MAX_METADATA_BYTES, MAX_NAME_CHARS
from kvxferd.wire.peer import (
    Acknowledge,
    Answer,
    AskGrant,
    Consumer,
    Granted,
    GrantsRenewed,
    PeerRefused,
    Question,
    RenewGrants,
    ReturnGrant,
)

# Shorter ones would be renewed all the time; longer ones are no leases.
MIN_LEASE_S, MAX_LEASE_S = 0.05, 7 * 24 * 3600.0
MAX_ADDRESS = (1 << 64) - 1
MAX_STALE_BINDINGS = 3  # a source whose movers change faster than we can ask is not readable


class HoldState(StrEnum):
    """How far it has come."""

    LEARNING = "handshake"
    ASKING = "grant"
    HELD = "held"
    REFUSED = "refused"
    ENDED = "ended"


@dataclass(slots=True)
class Hold:
    """One local rank's access to one transfer."""

    grant: GrantId
    rank: LocalRank
    ref: TransferRef
    wait_s: float
    started: float
    state: HoldState = HoldState.LEARNING
    learnt: float | None = None  # when the engine was known
    settled: float | None = None  # when the grant was there, or refused
    remote: RemoteEngine | None = None
    plan: Plan | None = None
    granted: Granted | None = None
    refusal: Refusal | None = None
    num_stale: int = 0
    kept_bytes: int = 0  # of the rank's user, for the source's block ids
    on_settled: Callable[[], None] | None = None

    def consumer(self) -> Consumer:
        """Who reads."""
        spec = self.rank.spec
        return Consumer(spec.engine_id, spec.generation, spec.rank, spec.pp_size * spec.tp_size)


class Holds:
    """Takes holds, renews their grants, and ends them."""

    def __init__(self, moment: Moment, peers: Peers, movers: Movers, kept: KeptIds) -> None:
        self._moment = moment
        self._peers = peers
        self._movers = movers
        self._kept = kept
        self._planning = Planning(moment)
        self._held: dict[Endpoint, dict[GrantId, Hold]] = {}
        peers.keep(self._held.keys)

    def num_grants(self) -> dict[Endpoint, int]:
        """How many grants are held at each peer."""
        return {endpoint: len(held) for endpoint, held in self._held.items()}

    def take(self, rank: LocalRank, ref: TransferRef, wait_s: float) -> Hold:
        """Start taking a hold. `on_settled` is called once, when it is held or refused."""
        hold = Hold(GrantId(self._moment.new_token()), rank, ref, wait_s, self._moment.now)
        self._learn(hold)
        return hold

    def when_settled(self, hold: Hold, act: Callable[[], None]) -> None:
        """Call `act` once the hold is held or refused; now, if it is."""
        if hold.state in (HoldState.HELD, HoldState.REFUSED):
            act()
        else:
            hold.on_settled = act

    def describe_wait(self, hold: Hold) -> str:
        """What a hold that is not settled waits for: whose answer, since when, and what to check."""
        if hold.state not in (HoldState.LEARNING, HoldState.ASKING):
            return f"in {hold.state}"
        asked = f"engine {hold.ref.engine}" if hold.state is HoldState.LEARNING else "a grant"
        silent_s = self._peers.silent_s(hold.ref.endpoint, hold.started)
        wait_s = self._moment.settings.handshake_wait_s
        text = (
            f"in {hold.state}: {address_of(hold.ref.endpoint)} was asked for {asked}, and has sent nothing "
            f"for {silent_s:.1f} s; {CHECK_PEER}"
        )
        # A peer answers at once, unless it waits for ranks.
        return (
            text
            if silent_s > wait_s
            else f"{text}; or its ranks were not ready, for which it waits {wait_s:g} s"
        )

    def _learn(self, hold: Hold) -> None:
        wait_s = min(hold.wait_s, self._moment.settings.handshake_wait_s)
        self._peers.learn(
            hold.ref.endpoint,
            hold.ref.engine,
            wait_s,
            lambda got: self._learnt(hold, got),
            hold.rank.uid,
        )

    def _learnt(self, hold: Hold, outcome: RemoteEngine | Refusal) -> None:
        if hold.state is not HoldState.LEARNING:
            return
        hold.learnt = self._moment.now
        if isinstance(outcome, Refusal):
            self._settle(hold, outcome)
            return
        hold.remote = outcome
        try:
            hold.plan = self._planning.plan(hold.rank, outcome)
        except KvxferdError as error:
            self._settle(hold, Refusal(error.code, error.message))
            return
        hold.state = HoldState.ASKING
        self._ask(hold, outcome, hold.plan)

    def _ask(self, hold: Hold, remote: RemoteEngine, plan: Plan) -> None:
        def make(request: int) -> Question:
            return AskGrant(
                request=request,
                grant=hold.grant,
                ref=hold.ref,
                consumer=hold.consumer(),
                reads=tuple((rank, remote.ranks[rank].binding.agent) for rank in plan.sources),
                wait_s=wait_s,
            )

        # No source waits longer than this, whatever a pull's deadline: more is only silence.
        wait_s = min(hold.wait_s, self._moment.settings.handshake_wait_s)
        give_up_s = wait_s + self._moment.settings.silent_after_s
        self._peers.ask(
            hold.ref.endpoint, make, give_up_s, lambda answer: self._asked(hold, answer), hold.rank.uid
        )

    def _asked(self, hold: Hold, answer: Answer) -> None:
        if hold.state is not HoldState.ASKING:
            if isinstance(answer, Granted):
                self._return(hold)  # nobody wants it any more
            return
        if isinstance(answer, Granted):
            if problem := _nonsense(answer):
                self._settle(hold, Refusal(Code.BAD_FRAME, f"cannot use the peer's grant: {problem}"))
                self._return(hold)
                return
            self._hold(hold, answer)
        elif isinstance(answer, PeerRefused):
            if answer.code is Code.BINDING_STALE and hold.num_stale < MAX_STALE_BINDINGS:
                hold.num_stale += 1
                hold.state = HoldState.LEARNING
                self._peers.forget_engine(hold.ref.endpoint, hold.ref.engine)
                self._learn(hold)
                return
            self._settle(hold, Refusal(answer.code, answer.message, answer.retry_after_s))
        else:
            what = type(answer).__name__
            self._settle(hold, Refusal(Code.BAD_FRAME, f"cannot use the peer's answer to a grant: a {what}"))

    def _hold(self, hold: Hold, granted: Granted) -> None:
        size, uid = kept_bytes(granted.blocks) + len(granted.fence_metadata), hold.rank.uid
        try:
            self._kept.check(uid, size, f"hold transfer {hold.ref.transfer_id}")
        except BusyError as error:
            self._settle(hold, Refusal(error.code, error.message, error.retry_after_s))
            self._return(hold)
            return
        self._kept.add(uid, size)
        hold.kept_bytes = size
        hold.granted = granted
        hold.state = HoldState.HELD
        held = self._held.setdefault(hold.ref.endpoint, {})
        held[hold.grant] = hold
        if len(held) == 1:
            self._renew_later(hold.ref.endpoint, granted.lease_s)
        try:
            self.preload(hold)
        except PeerError as error:
            self._forget(hold.ref.endpoint, hold.grant)
            self._settle(hold, Refusal(error.code, error.message))
            self._return(hold)
            return
        self._settle(hold, None)

    def _settle(self, hold: Hold, refusal: Refusal | None) -> None:
        if refusal is not None:
            hold.state = HoldState.REFUSED
            hold.refusal = refusal
            hold.remote = None  # a prepared hold may be kept for minutes
        hold.settled = self._moment.now
        act, hold.on_settled = hold.on_settled, None
        if act is not None:
            act()

    def preload(self, hold: Hold) -> None:
        """Give the rank's mover the plan and the agents that the hold's pull will need. Raises PeerError."""
        if hold.rank.mover is None or self._movers.get(hold.rank.mover) is None:
            return
        assert hold.plan is not None and hold.remote is not None and hold.granted is not None
        self._movers.load_plan(hold.rank.mover, hold.plan)
        for rank in hold.plan.sources:
            binding = hold.remote.ranks[rank].binding
            self._movers.load_remote(
                hold.rank.mover, hold.ref.endpoint, binding.agent, binding.metadata, _word_of(binding)
            )
        granted = hold.granted
        self._movers.load_remote(
            hold.rank.mover,
            hold.ref.endpoint,
            granted.fence_agent,
            granted.fence_metadata,
            granted.fence_address,
        )

    # --- keeping

    def _renew_later(self, endpoint: Endpoint, lease_s: float) -> None:
        self._moment.after(("renew", endpoint), lease_s / 6, lambda: self._renew(endpoint, lease_s))

    def _renew(self, endpoint: Endpoint, lease_s: float) -> None:
        held = self._held.get(endpoint)
        if not held:
            return
        oldest = self._moment.now - self._moment.settings.max_hold_s
        # Each user's by themselves: one whose questions have no room must not end the grants of another.
        grants_of: dict[int, list[GrantId]] = {}
        for grant, hold in held.items():
            if (hold.settled or 0.0) > oldest:
                grants_of.setdefault(hold.rank.uid, []).append(grant)
        for uid, grants in grants_of.items():
            for first in range(0, len(grants), MAX_GRANTS_PER_RENEWAL):
                some = tuple(grants[first : first + MAX_GRANTS_PER_RENEWAL])
                self._ask_renewal(endpoint, some, lease_s, uid)
        self._renew_later(endpoint, lease_s)

    def _ask_renewal(self, endpoint: Endpoint, grants: tuple[GrantId, ...], lease_s: float, uid: int) -> None:
        self._peers.ask(
            endpoint,
            lambda request: RenewGrants(request=request, grants=grants),
            lease_s,
            lambda answer: self._renewed(endpoint, answer),
            uid,
        )

    def _renewed(self, endpoint: Endpoint, answer: Answer) -> None:
        # A grant that ended does not end its pull: the fence word decides that. But it need not
        # be renewed, and a pull that has not begun will ask anew.
        if isinstance(answer, GrantsRenewed):
            for grant in answer.ended:
                if hold := self._forget(endpoint, grant):
                    hold.state = HoldState.ENDED

    def forget_engine(self, hold: Hold) -> None:
        """What the hold was planned on is out of date: the next one asks anew."""
        self._peers.forget_engine(hold.ref.endpoint, hold.ref.engine)

    def _forget(self, endpoint: Endpoint, grant: GrantId) -> Hold | None:
        held = self._held.get(endpoint, {})
        hold = held.pop(grant, None)
        if not held:
            self._held.pop(endpoint, None)
            self._moment.timers.stop(("renew", endpoint))
        return hold

    # --- ending

    def give_back(self, hold: Hold) -> None:
        """End the hold without an acknowledgement. Harmless where it has ended."""
        state, hold.state = hold.state, HoldState.ENDED
        hold.on_settled = None
        self._let_go(hold)
        self._forget(hold.ref.endpoint, hold.grant)
        if state in (HoldState.HELD, HoldState.ASKING):
            self._return(hold)

    def _let_go(self, hold: Hold) -> None:
        """Keep the source's block ids no longer, though a last message about the hold may be under way."""
        self._kept.remove(hold.rank.uid, hold.kept_bytes)
        hold.kept_bytes, hold.granted, hold.remote = 0, None, None

    def _return(self, hold: Hold) -> None:
        self._peers.ask(
            hold.ref.endpoint,
            lambda request: ReturnGrant(request=request, grant=hold.grant),
            self._moment.settings.silent_after_s,
            lambda answer: None,
            hold.rank.uid,
        )

    def acknowledge(self, hold: Hold, on_answer: Callable[[bool], None]) -> None:
        """End the hold: this rank has the bytes. Repeated until answered, or for a long while."""
        hold.state = HoldState.ENDED
        self._let_go(hold)
        self._forget(hold.ref.endpoint, hold.grant)
        self._peers.ask(
            hold.ref.endpoint,
            lambda request: Acknowledge(
                request=request, grant=hold.grant, ref=hold.ref, consumer=hold.consumer()
            ),
            self._moment.settings.acknowledge_for_s,
            lambda answer: on_answer(not isinstance(answer, PeerRefused)),
            hold.rank.uid,
        )


def _word_of(binding: Binding) -> int:
    """Where a word of the rank's host memory lies; 0 where it has none."""
    plain = (region for region in binding.regions if region.mem_type == "DRAM" and not region.staged)
    return next((region.address for region in plain if region.size_bytes >= FENCE_WORD_BYTES), 0)


def _nonsense(granted: Granted) -> str:
    """What is wrong with a grant. A timer or a mover would choke on it."""
    if not MIN_LEASE_S <= granted.lease_s <= MAX_LEASE_S:  # NaN is not in between either
        return f"a lease of {granted.lease_s} s"
    if len(granted.fence_word) != FENCE_WORD_BYTES:
        return f"a fence word of {len(granted.fence_word)} bytes"
    if not 0 < granted.fence_address <= MAX_ADDRESS - FENCE_WORD_BYTES:
        return f"a fence word at address {granted.fence_address}"
    if not 0 < len(granted.fence_agent) <= MAX_NAME_CHARS:
        return f"an agent's name of {len(granted.fence_agent)} characters"
    if len(granted.fence_metadata) > MAX_METADATA_BYTES:
        return f"{len(granted.fence_metadata)} bytes of metadata"
    return ""
