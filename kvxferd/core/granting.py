"""Who may read a published transfer: grants asked, waited for, given, renewed, returned, acknowledged."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from kvxferd.core.attendance import Attendance
from kvxferd.core.effects import ToRoute
from kvxferd.core.fences import Fences, PagePlace
from kvxferd.core.limits import check_count, check_waiting
from kvxferd.core.moment import Moment
from kvxferd.core.registry import LocalEngine, Registry
from kvxferd.core.source import Source
from kvxferd.core.transfers import Grant, Transfer, TransferKey
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.ids import AgentName, EngineId, EngineKey, GrantId
from kvxferd.wire.common import TransferRef
from kvxferd.wire.ids_stream import split_ids
from kvxferd.wire.limits import FENCE_WORD_BYTES, MAX_ENDPOINT_CHARS, MAX_NAME_CHARS, MAX_RANKS
from kvxferd.wire.peer import (
    AbandonTransfer,
    Acknowledge,
    AskGrant,
    Done,
    Granted,
    GrantsRenewed,
    PeerRefused,
    RenewGrants,
    ReturnGrant,
    refusal_of,
)

K = TypeVar("K")

# 64 ranks' agents of 20 characters are 1,280; all of the largest engine's are 80 KiB. Of the 32,768 asks that
# may wait (`limits.max_waiting`) 256 may be long, 64 of one asker: 32 MiB, and 256 MiB of the others at most.
MAX_ASK_CHARS, LONG_ASK_CHARS, MAX_LONG_ASKS, MAX_LONG_ASKS_OF_ONE = 128 << 10, 8 << 10, 256, 64
# Each rank of a consumer engine has one grant on a transfer, and the largest engine has 4,096. One key may be
# that of a few nodes: 1,024 are 8 of them with `limits.max_ranks`. With names of 256 characters a grant takes
# 1.5 KiB: 6 MiB a transfer, and 1.5 MiB by one asker, where a hostile one had 60,000 grants and 90 MiB.
MAX_GRANTS, MAX_GRANTS_OF_ONE = 4096, 1024
# Engines that say they have read one transfer, or want no more of it. A request is routed to a handful.
MAX_READERS = 256
# Asks that one change has looked at in one turn of the loop: 20 us each, 5 ms. What is left follows in turns
# of its own: all 32,768 took 640 ms, each time that a rank came or went.
ASKS_PER_TURN, NEXT_TURN_S = 256, 0.001


@dataclass(slots=True)
class _Ask:
    """A grant that is asked for and not answered."""

    grant: GrantId  # among all peers' names
    asker: str  # the peer's key, or its route
    route: bytes
    question: AskGrant
    transfer: TransferKey  # that the question names: five parts ask for it
    asked_at: float
    agents: frozenset[AgentName] = frozenset()  # already attending for it


@dataclass(frozen=True, slots=True)
class _Obstacle:
    """Why an ask cannot be granted now. Refused once it has waited `wait_s`."""

    code: Code
    message: str
    wait_s: float = 0.0


class Granting:
    """Decides every ask, now or when what it waits for has come."""

    def __init__(
        self, moment: Moment, registry: Registry, source: Source, attendance: Attendance, fences: Fences
    ) -> None:
        self._moment = moment
        self._registry = registry
        self._source = source
        self._attendance = attendance
        self._fences = fences
        self._asks: dict[GrantId, _Ask] = {}
        # A publish concerns the asks for it, a mover that polls those that want it, and no others:
        # thousands may be waiting for requests that are being computed.
        self._asks_for: dict[TransferKey, dict[GrantId, None]] = {}
        self._asks_of: dict[AgentName, dict[GrantId, None]] = {}
        self._asks_on: dict[EngineId, dict[GrantId, None]] = {}
        self._num_of_asker: Counter[str] = Counter()
        self._long: dict[GrantId, None] = {}  # those that name many agents
        self._num_long_of: Counter[str] = Counter()
        self._due: dict[GrantId, None] = {}  # to be looked at in the next turns

    # --- asking

    def ask(self, route: bytes, question: AskGrant, key: str = "") -> None:
        """Answer now, or once the transfer is published, ready, and its movers poll."""
        grant = _name_of(question.grant, key)
        waiting = self._asks.get(grant)
        asker = waiting.asker if waiting else key or route.hex()
        try:
            is_long = _is_long(question)
            if is_long and grant not in self._long:
                self._check_long(asker)  # asked again, a short question may have become a long one
            if waiting is None:
                of_asker = self._num_of_asker[asker]
                check_waiting(of_asker, len(self._asks), self._moment.settings.limits)
        except KvxferdError as error:
            self._moment.do(ToRoute(route, refusal_of(question.request, error)))
            return
        if waiting is None:
            key_of_transfer = (question.ref.engine, question.ref.transfer_id)
            waiting = _Ask(grant, asker, route, question, key_of_transfer, self._moment.now)
            self._asks[grant] = waiting
            self._num_of_asker[asker] += 1
        else:
            self._unlist_question(waiting)
            waiting.route, waiting.question = route, question  # asked again: the last route is the live one
            waiting.transfer = (question.ref.engine, question.ref.transfer_id)
        if is_long:
            self._long[grant] = None
            self._num_long_of[asker] += 1
        self._asks_for.setdefault(waiting.transfer, {})[grant] = None
        self._asks_on.setdefault(question.ref.engine_id, {})[grant] = None
        self._consider(waiting)

    def _check_long(self, asker: str) -> None:
        what = "wait for a grant that names so many agents: too many such questions wait"
        check_count(len(self._long), MAX_LONG_ASKS, what, "not a setting")
        check_count(self._num_long_of[asker], MAX_LONG_ASKS_OF_ONE, what, "of one asker; not a setting")

    def reconsider(self, engine_id: EngineId) -> None:
        """Something changed that asks for this engine may have waited for: a rank, a fence page, a mover."""
        self._look_at(self._asks_on.get(engine_id, {}))

    def reconsider_transfer(self, key: TransferKey) -> None:
        """The transfer was published, or a rank is ready with it."""
        self._look_at(self._asks_for.get(key, {}))

    def reconsider_agent(self, agent: AgentName) -> None:
        """The agent's mover polls."""
        self._look_at(self._asks_of.get(agent, {}))

    def _look_at(self, concerned: dict[GrantId, None]) -> None:
        """Consider the first asks now, and have the others follow."""
        first = list(islice(concerned, ASKS_PER_TURN))
        if len(concerned) > len(first):
            self._due.update(concerned)
        for grant in first:
            self._due.pop(grant, None)
            self._consider(self._asks[grant])
        self._go_on_later()

    def _go_on_later(self) -> None:
        # Never moved: changes that come faster would else put off what is left.
        if self._due and "asks-due" not in self._moment.timers:
            self._moment.after("asks-due", NEXT_TURN_S, self._go_on)

    def _go_on(self) -> None:
        for grant in list(islice(self._due, ASKS_PER_TURN)):
            del self._due[grant]
            self._consider(self._asks[grant])
        self._go_on_later()

    def _consider(self, ask: _Ask) -> None:
        transfer = self._source.transfers.live.get(ask.transfer)
        found = self._obstacle(ask, transfer)
        if not isinstance(found, _Obstacle):
            assert transfer is not None
            self._give(ask, transfer, found)
            return
        left_s = ask.asked_at + found.wait_s - self._moment.now
        if left_s > 0:
            self._moment.after(("ask", ask.grant), left_s, lambda: self._consider(ask))
            return
        self._refuse(ask, found.code, found.message)

    def _refuse(self, ask: _Ask, code: Code, message: str) -> None:
        self._drop(ask)
        refused = PeerRefused(request=ask.question.request, code=code, message=message)
        self._moment.do(ToRoute(ask.route, refused))

    def _drop(self, ask: _Ask) -> None:
        del self._asks[ask.grant]
        self._due.pop(ask.grant, None)
        self._num_of_asker[ask.asker] -= 1
        if not self._num_of_asker[ask.asker]:
            del self._num_of_asker[ask.asker]
        self._unlist_question(ask)
        for agent in ask.agents:
            self._unlist(self._asks_of, agent, ask.grant)
        self._moment.timers.stop(("ask", ask.grant))
        transfer = self._source.transfers.granted.get(ask.grant)
        kept = transfer.grants[ask.grant].agents if transfer else frozenset()
        for agent in ask.agents - kept:
            self._attendance.leave(agent, ask.grant)

    def _unlist_question(self, ask: _Ask) -> None:
        if ask.grant in self._long:
            del self._long[ask.grant]
            self._num_long_of[ask.asker] -= 1
            if not self._num_long_of[ask.asker]:
                del self._num_long_of[ask.asker]
        self._unlist(self._asks_for, ask.transfer, ask.grant)
        self._unlist(self._asks_on, ask.question.ref.engine_id, ask.grant)

    @staticmethod
    def _unlist(index: dict[K, dict[GrantId, None]], key: K, grant: GrantId) -> None:
        listed = index[key]
        del listed[grant]
        if not listed:
            del index[key]

    def _obstacle(self, ask: _Ask, transfer: Transfer | None) -> _Obstacle | PagePlace:
        """Why the ask cannot be granted; where its fence page lies if it can."""
        engine_key, _ = ask.transfer
        engine = self._registry.get(engine_key)
        if obstacle := self._engine_obstacle(ask.question, engine, engine_key):
            return obstacle
        if transfer is None:
            return self._absence(ask.question.ref)
        assert engine is not None
        return self._transfer_obstacle(ask, transfer, engine)

    def _engine_obstacle(
        self, question: AskGrant, engine: LocalEngine | None, key: EngineKey
    ) -> _Obstacle | None:
        ref = question.ref
        what = f"cannot grant transfer {ref.transfer_id}"
        if self._registry.is_superseded(key):
            newest = self._registry.newest(ref.engine_id)
            return _Obstacle(
                Code.GENERATION_STALE,
                f"{what}: engine {ref.engine} has been replaced by {newest}; route anew",
            )
        if engine is None:
            return _Obstacle(
                Code.ENGINE_UNKNOWN,
                f"{what}: no rank of engine {ref.engine} is registered here",
                self._moment.settings.unknown_wait_s,
            )
        if lacking := engine.lacking():
            ranks = ", ".join(map(str, lacking))
            return _Obstacle(
                Code.ENGINE_INCOMPLETE,
                f"{what}: ranks {ranks} of engine {ref.engine} are not there",
                self._patience(question),
            )
        for rank, agent in question.reads:
            record = engine.ranks.get(rank)
            if record is None or record.agent != agent:
                return _Obstacle(
                    Code.BINDING_STALE, f"{what}: rank {rank} has another mover; fetch the engine again"
                )
        return None

    def _absence(self, ref: TransferRef) -> _Obstacle:
        what = f"cannot grant transfer {ref.transfer_id}"
        tombstone = self._source.transfers.tombstones.get((ref.engine, ref.transfer_id))
        if tombstone is not None and tombstone.nonce == ref.nonce:
            return _Obstacle(
                Code.RELEASED, f"{what}: it was released ({tombstone.why}); its blocks may hold others"
            )
        return _Obstacle(
            Code.TRANSFER_UNKNOWN,
            f"{what}: engine {ref.engine} has published none of that id",
            self._moment.settings.unknown_wait_s,
        )

    def _transfer_obstacle(self, ask: _Ask, transfer: Transfer, engine: LocalEngine) -> _Obstacle | PagePlace:
        question = ask.question
        what = f"cannot grant transfer {transfer.transfer_id}"
        if transfer.nonce != question.ref.nonce:
            return _Obstacle(Code.NONCE_WRONG, f"{what}: the reference's nonce is not the transfer's")
        if self._source.transfers.granted.get(ask.grant, transfer) is not transfer:
            return _Obstacle(
                Code.OUT_OF_PLACE,
                f"{what}: grant {question.grant[:80]} is on another transfer; choose a new name",
            )
        if ask.grant not in transfer.grants and (
            len(transfer.grants) >= MAX_GRANTS or transfer.num_grants_of[ask.asker] >= MAX_GRANTS_OF_ONE
        ):
            return _Obstacle(
                Code.BUSY,
                f"{what}: it has {len(transfer.grants)} grants; {MAX_GRANTS} are the limit, and "
                f"{MAX_GRANTS_OF_ONE} of one asker",
            )
        if engine.mapped_anew(transfer.incarnations) is not None:
            self._source.release(transfer, Code.RANK_LOST)
            return _Obstacle(
                Code.RANK_LOST, f"{what}: a rank's memory was mapped anew since it was published"
            )
        if not self._source.is_ready(transfer, engine):
            unready = ", ".join(str(r) for r in engine.spec.ranks() if r not in transfer.ready)
            return _Obstacle(
                Code.TRANSFER_NOT_READY,
                f"{what}: ranks {unready} have not said ready",
                self._patience(question),
            )
        place = self._fences.place(transfer.session)
        if place is None:
            return _Obstacle(
                Code.MOVER_LOST, f"{what}: no mover serves its fence page yet", self._patience(question)
            )
        agents = frozenset([place.agent, *(agent for _, agent in question.reads)])
        for agent in agents - ask.agents:
            self._attendance.attend(agent, ask.grant)
            self._asks_of.setdefault(agent, {})[ask.grant] = None
        for agent in ask.agents - agents:
            self._attendance.leave(agent, ask.grant)
            self._unlist(self._asks_of, agent, ask.grant)
        ask.agents = agents
        if not all(map(self._attendance.is_attending, agents)):
            return _Obstacle(Code.MOVER_LOST, f"{what}: its movers do not answer", self._patience(question))
        return place

    def _patience(self, question: AskGrant) -> float:
        return min(question.wait_s, self._moment.settings.handshake_wait_s)

    def _give(self, ask: _Ask, transfer: Transfer, place: PagePlace) -> None:
        question, now = ask.question, self._moment.now
        settings, known = self._moment.settings, transfer.grants.get(ask.grant)
        born = known.born if known else now
        for agent in known.agents - ask.agents if known else ():
            self._attendance.leave(agent, ask.grant)
        grant = Grant(
            grant=ask.grant,
            asker=known.asker if known else ask.asker,
            consumer=question.consumer,
            agents=ask.agents,
            born=born,
            # Asking again is renewing, and has the same end.
            until=max(known.until if known else 0.0, min(now, born + settings.max_hold_s) + settings.lease_s),
        )
        self._source.transfers.grant(transfer, grant)
        self._drop(ask)
        stream = question.request
        parts, blocks = split_ids(transfer.blocks, stream)
        for part in parts:
            self._moment.do(ToRoute(ask.route, part))
        granted = Granted(
            request=question.request,
            grant=question.grant,
            blocks=blocks,
            num_tokens=transfer.num_tokens,
            lease_s=self._moment.settings.lease_s,
            fence_agent=place.agent,
            fence_address=place.address + transfer.fence_slot * FENCE_WORD_BYTES,
            fence_word=transfer.fence_word,
            fence_metadata=place.metadata,
            stream=stream if parts else 0,
        )
        self._moment.do(ToRoute(ask.route, granted))

    # --- holding and letting go

    def renew(self, route: bytes, question: RenewGrants, key: str = "") -> None:
        """Extend the grants that live; name those that have ended."""
        ended = []
        settings, now = self._moment.settings, self._moment.now
        for grant_id in question.grants:
            name = _name_of(grant_id, key)
            transfer = self._source.transfers.granted.get(name)
            if transfer is None:
                ended.append(grant_id)
                continue
            grant = transfer.grants[name]
            grant.until = min(now + settings.lease_s, grant.born + settings.max_hold_s)
        self._moment.do(ToRoute(route, GrantsRenewed(request=question.request, ended=tuple(ended))))

    def give_back(self, route: bytes, question: ReturnGrant, key: str = "") -> None:
        """A pull that failed needs its grant no more."""
        grant = _name_of(question.grant, key)
        if waiting := self._asks.get(grant):
            self._refuse(waiting, Code.CANCELLED, "its reader gave the grant back before it had it")
        self._source.end_grant(grant)
        self._moment.do(ToRoute(route, Done(request=question.request)))

    def acknowledge(self, route: bytes, question: Acknowledge, key: str = "") -> None:
        """A consumer rank holds the bytes; with the last one the transfer is complete."""
        asker = key or route.hex()
        transfer = self._owned(question.ref)
        if transfer is not None and self._has_room(asker, question, transfer):
            grant = _name_of(question.grant, key)
            if self._source.transfers.granted.get(grant) is transfer:
                self._source.end_grant(grant)
            transfer.reader(question.consumer).acknowledged.add(question.consumer.rank)
            if transfer.is_read_by_all:
                self._source.release(transfer, Code.COMPLETED)
        self._moment.do(ToRoute(route, Done(request=question.request)))

    def abandon(self, route: bytes, question: AbandonTransfer, key: str = "") -> None:
        """A consumer engine wants nothing more of the transfer."""
        asker = key or route.hex()
        transfer = self._owned(question.ref)
        if transfer is not None and self._has_room(asker, question, transfer):
            transfer.reader(question.consumer).abandoned = True
            if transfer.is_read_by_all:
                self._source.release(transfer, Code.ABANDONED)
        self._moment.do(ToRoute(route, Done(request=question.request)))

    def _has_room(self, asker: str, question: Acknowledge | AbandonTransfer, transfer: Transfer) -> bool:
        """Whether the consumer may be kept beside the transfer. A made-up one is answered, and not kept."""
        consumer, acknowledges = question.consumer, isinstance(question, Acknowledge)
        known = transfer.readers.get(EngineKey(consumer.engine_id, consumer.generation))
        if known is not None:
            fits = consumer.rank in known.acknowledged or len(known.acknowledged) < MAX_RANKS
        else:
            names = (consumer.engine_id, consumer.generation)
            fits = len(transfer.readers) < MAX_READERS and max(map(len, names)) <= MAX_NAME_CHARS
        return fits and self._source.transfers.keep_reader(transfer, asker, consumer, acknowledges)

    def _owned(self, ref: TransferRef) -> Transfer | None:
        """The live transfer that the reference's holder may speak of."""
        transfer = self._source.transfers.live.get((ref.engine, ref.transfer_id))
        return transfer if transfer is not None and transfer.nonce == ref.nonce else None


def _name_of(grant: GrantId, key: str) -> GrantId:
    """The grant's name among all peers': an asker chooses it, and with CURVE can name none but its own."""
    return GrantId(f"{key}/{grant}") if key else grant


def _is_long(question: AskGrant) -> bool:
    """Whether it names many agents. Raises EngineError where its names are too long.

    An ask may wait for seconds among thousands: what it names is kept as long.
    """
    ref, consumer = question.ref, question.consumer
    agents = [agent for _, agent in question.reads]
    names = [question.grant, ref.engine_id, ref.generation, ref.transfer_id, ref.nonce]
    names += [consumer.engine_id, consumer.generation, *agents]
    longest = max(map(len, names))
    if longest > MAX_NAME_CHARS or len(ref.endpoint) > MAX_ENDPOINT_CHARS:
        raise EngineError(
            f"cannot grant: a name of {longest} characters in the question; {MAX_NAME_CHARS} is the limit",
            Code.BAD_FRAME,
        )
    if sum(map(len, names)) > MAX_ASK_CHARS:
        raise EngineError(
            f"cannot grant: the question names {len(question.reads)} agents in more than {MAX_ASK_CHARS} "
            "characters",
            Code.BAD_FRAME,
        )
    return sum(map(len, agents)) > LONG_ASK_CHARS
