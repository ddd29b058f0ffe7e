"""What a greeted session asks for about transfers: publish, ready, prepare, pull, cancel, abandon."""

from __future__ import annotations

from typing import assert_never

import msgspec

from kvxferd.core.effects import ToWorker
from kvxferd.core.holds import Hold, Holds, HoldState
from kvxferd.core.member import Member
from kvxferd.core.moment import Moment
from kvxferd.core.peers import Peers
from kvxferd.core.pull import Pull
from kvxferd.core.pulls import Pulls
from kvxferd.core.registry import LocalRank, RankState, Registry
from kvxferd.core.sessions import Session
from kvxferd.core.shares import Shares
from kvxferd.core.source import Source
from kvxferd.errors import BusyError, Code, EngineError, KvxferdError, ProtocolError
from kvxferd.ids import GroupName, Ticket
from kvxferd.layout import PackedBlocks
from kvxferd.plan import check_blocks_by
from kvxferd.wire.codec import negotiate
from kvxferd.wire.common import BlockIds, Descriptors, TransferRef
from kvxferd.wire.endpoint import parse_endpoint
from kvxferd.wire.ids_stream import Blocks
from kvxferd.wire.limits import (
    FENCE_SLOTS,
    FENCE_WORD_BYTES,
    MAX_GROUPS_PER_REQUEST,
    MAX_NAME_CHARS,
    MAX_NOTICED,
)
from kvxferd.wire.peer import AbandonTransfer, Consumer, Question
from kvxferd.wire.worker import (
    FIRST_WITH_LATE_DESCRIPTORS,
    WORKER_VERSIONS,
    Abandon,
    Attach,
    Cancel,
    ClientMessage,
    Failed,
    Hello,
    MoverAcknowledged,
    NewMover,
    Noticed,
    Prepare,
    Publish,
    PublishRefused,
    PullsResumed,
    Ready,
    Register,
    Resume,
    Suspend,
    Unpublish,
    Welcome,
)
from kvxferd.wire.worker import (
    Pull as PullRequest,
)

MAX_PREPARED = 1024  # holds taken ahead, per session; each renews a grant for minutes
# Of all sessions, 2 KB each: sixteen ranks that prepare all they may, twice. Who gets none pulls without.
MAX_PREPARED_HERE = 32 * MAX_PREPARED
# Transfers that a session gives up and whose source has not answered; each is asked again for two minutes. An
# engine that aborts eight requests a second, whose source is dead, has 1,024. What is not told ends by its
# lease.
MAX_ABANDONING, MAX_ABANDONING_HERE = 1024, 16 * 1024
MAX_READY_TOKENS = (1 << 63) - 1  # msgpack has more, and is handed on to peers
MAX_PULL_S = 24 * 3600.0  # a longer deadline is a mistake in units


class Requests:
    """Checks what a session asks, and hands it on."""

    def __init__(
        self,
        moment: Moment,
        registry: Registry,
        source: Source,
        holds: Holds,
        pulls: Pulls,
        peers: Peers,
        member: Member,
    ) -> None:
        self._moment = moment
        self._registry = registry
        self._source = source
        self._holds = holds
        self._pulls = pulls
        self._peers = peers
        self._member = member
        self._prepared_of = Shares(MAX_PREPARED_HERE)
        self._abandoning_of = Shares(MAX_ABANDONING_HERE)

    def greet(self, session: Session, said: Hello) -> None:
        """Agree on a version. Raises ProtocolError where there is none."""
        version = negotiate(WORKER_VERSIONS, said.versions)
        session.greeted, session.version = True, version
        session.notices = said.notices and version < FIRST_WITH_LATE_DESCRIPTORS
        welcome = Welcome(version=version, boot_id=self._moment.boot, lease_s=self._moment.settings.lease_s)
        self._moment.do(ToWorker(session.session, welcome))

    def hear(self, session: Session, said: ClientMessage, fence_word: bytes) -> None:
        """Do what is asked. Raises ProtocolError for what no correct client sends."""
        match said:
            case BlockIds():
                if not session.is_admitted:
                    raise ProtocolError(
                        "cannot take block ids before a registration: register or attach first",
                        Code.OUT_OF_PLACE,
                    )
                session.assembly.add(said)
            case Descriptors():
                pass  # the shell keeps them for the registration that follows
            case Publish():
                self._publish(session, said, fence_word)
            case Ready():
                self._ready(session, said)
            case Unpublish():
                if session.engine is not None:
                    self._source.unpublish(session.session, session.engine, said.transfer_id)
            case Prepare():
                self._prepare(session, said)
            case PullRequest():
                self._pull(session, said)
            case Cancel():
                if session.rank is not None:
                    self._pulls.cancel(session.rank, said.ticket)
            case Noticed():
                self._noticed(session, said)
            case PullsResumed():
                self._check_tickets(said.tickets)
                self._check_tickets(said.arrived)
                if session.rank is not None:
                    self._pulls.resumed(session.rank, said)
            case Abandon():
                self._abandon(session, said.ref)
            case Hello() | Register() | Attach() | Suspend() | Resume() | NewMover() | MoverAcknowledged():
                raise ProtocolError(f"cannot take {type(said).__name__} here", Code.OUT_OF_PLACE)
            case _:
                assert_never(said)

    def _check_tickets(self, tickets: tuple[Ticket, ...]) -> None:
        most = max(MAX_NOTICED, self._moment.settings.limits.max_pulls_per_rank)
        if len(tickets) > most:
            raise ProtocolError(f"cannot take {len(tickets)} tickets: {most} pulls may run")

    def _noticed(self, session: Session, said: Noticed) -> None:
        self._check_tickets(said.tickets)
        if session.rank is not None:
            self._pulls.noticed(session.rank, said.tickets)

    # --- the source's side

    def _publish(self, session: Session, said: Publish, fence_word: bytes) -> None:
        _check_groups(said.blocks)
        try:
            blocks = session.assembly.complete(said.blocks, said.stream)
        except BusyError as error:
            self._refuse_publish(session, said, error)
            return
        problem = ""
        if session.engine is None:
            problem = "register or attach first"
        elif session.rank is None and not self._registry.may_publish(session.uid, session.engine.engine_id):
            problem = (
                f"engine {session.engine.engine_id} is another user's"  # its ranks came after the attach
            )
        elif len(fence_word) != FENCE_WORD_BYTES:
            problem = f"fence slot {said.fence_slot} is not within 0 .. {FENCE_SLOTS - 1}"
        elif not any(fence_word):
            # What a late reader finds where a mover has let go of a page: it must be nobody's word.
            problem = f"fence slot {said.fence_slot} holds no word; write 16 random bytes there first"
        elif not (0 < len(said.transfer_id) <= MAX_NAME_CHARS):
            problem = f"the transfer id must have 1 to {MAX_NAME_CHARS} characters"
        elif len(said.nonce) > MAX_NAME_CHARS:
            # Kept with the transfer and with what is remembered of it, and no reference could name it.
            problem = f"its nonce has {len(said.nonce)} characters; give 32 random hex digits"
        if problem or session.engine is None:
            text = f"cannot publish transfer {said.transfer_id[:80]}: {problem}"
            refused = PublishRefused(transfer_id=said.transfer_id, code=Code.OUT_OF_PLACE, message=text)
            self._moment.do(ToWorker(session.session, refused))
            return
        self._source.publish(session, session.engine, said, blocks, fence_word)

    def _refuse_publish(self, session: Session, said: Publish, error: KvxferdError) -> None:
        refused = PublishRefused(
            transfer_id=said.transfer_id,
            code=error.code,
            message=f"cannot publish transfer {said.transfer_id[:80]}: {error.message}",
            retry_after_s=error.retry_after_s,
        )
        self._moment.do(ToWorker(session.session, refused))

    def _ready(self, session: Session, said: Ready) -> None:
        rank = session.rank
        if rank is None:
            raise ProtocolError("cannot take ready: this connection is not a rank", Code.OUT_OF_PLACE)
        if len(said.transfer_id) > MAX_NAME_CHARS or len(said.incarnation) > MAX_NAME_CHARS:
            return  # no publish can have that name, no rank that incarnation
        if session.version >= 2 and not said.incarnation:
            raise ProtocolError("cannot take ready without the incarnation of the rank's memory")
        # A client of version 1 forgets at `suspend` what it was to repeat: what it sends is of this mapping.
        incarnation = said.incarnation or rank.incarnation
        if self._registry.is_home(rank.spec):
            self._source.ready(rank, incarnation, said.transfer_id)
        else:
            self._member.ready(rank, incarnation, said.transfer_id)

    # --- the sink's side

    def _pull(self, session: Session, said: PullRequest) -> None:
        _check_groups(said.blocks)
        try:
            blocks = session.assembly.complete(said.blocks, said.stream)
        except BusyError as error:
            self._refuse_pull(session, said, error)
            return
        try:
            rank, ref = self._admit(session, said, blocks)
        except KvxferdError as error:
            self._refuse_pull(session, said, error)
            return
        hold = self._prepared(session, ref) or self._holds.take(rank, ref, said.deadline_s)
        pull = Pull(
            pull=self._pulls.next_id(),
            rank=rank,
            ticket=said.ticket,
            ref=ref,
            blocks=blocks,
            num_tokens=said.num_tokens,
            deadline=self._moment.now + said.deadline_s,
            received=self._moment.now,
            hold=hold,
        )
        self._pulls.start(pull)

    def _refuse_pull(self, session: Session, said: PullRequest, error: KvxferdError) -> None:
        failed = Failed(
            ticket=said.ticket,
            code=error.code,
            message=error.message,
            safe_to_reuse=True,
            retry_after_s=error.retry_after_s,
        )
        self._moment.do(ToWorker(session.session, failed))

    def _admit(
        self, session: Session, said: PullRequest, blocks: dict[GroupName, PackedBlocks]
    ) -> tuple[LocalRank, TransferRef]:
        what = f"cannot pull transfer {said.ref.transfer_id[:80]}"
        rank = session.rank
        if rank is None:
            raise EngineError(f"{what}: this connection is not a rank; register first", Code.OUT_OF_PLACE)
        if self._moment.draining:
            raise EngineError(f"{what}: this daemon is draining; pull when it is back", Code.DRAINING)
        asleep = rank.state in (RankState.SUSPENDING, RankState.SUSPENDED)
        if asleep or not (rank.is_readable or rank.answered):
            raise EngineError(f"{what}: the rank is suspended; resume it first", Code.SUSPENDED)
        if not 0 < said.deadline_s <= MAX_PULL_S:
            raise EngineError(f"{what}: a deadline of {said.deadline_s} s; give 0 to {MAX_PULL_S:.0f}")
        ref = self._clean(said.ref)
        check_blocks_by(rank.rules, blocks, said.num_tokens)
        self._pulls.stalls.check(rank.uid, ref, what)
        self._pulls.check_room(rank, blocks, what.removeprefix("cannot "))
        return rank, ref

    def _clean(self, ref: TransferRef) -> TransferRef:
        """The reference came over a router: its endpoint is parsed, rebuilt, and one that may be asked."""
        for name in (ref.engine_id, ref.generation, ref.transfer_id, ref.nonce):
            if len(name) > MAX_NAME_CHARS:
                raise EngineError(
                    f"cannot use a reference that has a name of {len(name)} characters: "
                    f"{MAX_NAME_CHARS} is the limit",
                    Code.TRANSFER_UNKNOWN,
                )
        if not -1 <= ref.ready_tokens <= MAX_READY_TOKENS:
            raise EngineError(
                f"cannot use a reference of which {ref.ready_tokens} tokens are ready", Code.TRANSFER_UNKNOWN
            )
        endpoint = parse_endpoint(ref.endpoint)
        if endpoint != self._moment.endpoint:
            self._moment.trust.check(endpoint)
        return msgspec.structs.replace(ref, endpoint=endpoint)

    def _prepared(self, session: Session, ref: TransferRef) -> Hold | None:
        """A hold taken ahead, unless it has come to nothing: then a new one may fare better."""
        hold = session.prepared.pop(ref, None)
        if hold is not None:
            self._moment.timers.stop(("prepared", session.session, ref))
            self._prepared_of.give_back(session.uid)
            if hold.rank is not session.rank:
                self._holds.give_back(hold)  # of a registration that failed, maybe of another layout
                return None
            if hold.state in (HoldState.REFUSED, HoldState.ENDED):
                self._holds.give_back(hold)
                return None
        return hold

    def _prepare(self, session: Session, said: Prepare) -> None:
        rank = session.rank
        try:
            ref = self._clean(said.ref)
        except KvxferdError:
            return  # the pull will be told
        if rank is None or ref in session.prepared or self._moment.draining:
            return
        if len(session.prepared) + session.num_left >= MAX_PREPARED:
            return  # a pull takes its own hold
        if not self._prepared_of.take(session.uid):
            return
        session.prepared[ref] = self._holds.take(rank, ref, self._moment.settings.handshake_wait_s)
        self._moment.after(
            ("prepared", session.session, ref),
            self._moment.settings.max_hold_s,
            lambda: self._unprepare(session, ref),
        )

    def _unprepare(self, session: Session, ref: TransferRef) -> None:
        if hold := session.prepared.pop(ref, None):
            self._moment.timers.stop(("prepared", session.session, ref))
            is_settled = hold.state not in (HoldState.LEARNING, HoldState.ASKING)
            self._holds.give_back(hold)
            if is_settled:
                self._prepared_of.give_back(session.uid)
            else:
                self._leave(session, hold)

    def _leave(self, session: Session, hold: Hold) -> None:
        """Count it while what it asked may wait: else who prepares and leaves would have no limit."""
        session.num_left += 1

        def over() -> None:
            session.num_left -= 1
            self._prepared_of.give_back(session.uid)

        settings = self._moment.settings
        self._moment.after(("left", hold.grant), settings.handshake_wait_s + settings.silent_after_s, over)

    def _abandon(self, session: Session, ref: TransferRef) -> None:
        rank = session.rank
        if rank is None:
            return
        try:
            ref = self._clean(ref)
        except KvxferdError:
            return
        self._unprepare(session, ref)
        self._pulls.cancel_transfer(rank, ref)
        if ref in session.abandoning or len(session.abandoning) >= MAX_ABANDONING:
            return
        if not self._abandoning_of.take(session.uid):
            return
        session.abandoning.add(ref)
        spec = rank.spec
        consumer = Consumer(spec.engine_id, spec.generation, spec.rank, spec.pp_size * spec.tp_size)

        def make(request: int) -> Question:
            return AbandonTransfer(request=request, ref=ref, consumer=consumer)

        give_up_s = self._moment.settings.acknowledge_for_s
        self._peers.ask(ref.endpoint, make, give_up_s, lambda _: self._abandoned(session, ref), session.uid)

    def _abandoned(self, session: Session, ref: TransferRef) -> None:
        session.abandoning.discard(ref)
        self._abandoning_of.give_back(session.uid)

    def session_closed(self, session: Session) -> None:
        """What it had prepared is given back."""
        session.assembly.clear()
        for ref in list(session.prepared):
            self._unprepare(session, ref)


def _check_groups(blocks: Blocks) -> None:
    """Raise ProtocolError for more groups than a request has: what follows looks at each, and sorts them."""
    if len(blocks) > MAX_GROUPS_PER_REQUEST:
        raise ProtocolError(f"cannot take {len(blocks)} groups: at most {MAX_GROUPS_PER_REQUEST} go")
