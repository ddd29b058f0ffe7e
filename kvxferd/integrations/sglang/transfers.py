"""The life of a request's cache on either side, as SGLang polls it; without SGLang.

```text
prefill    BOOTSTRAPPING -> WAITING -> TRANSFERRING -> SUCCESS     a reader is there; published; `Released`
decode                      WAITING -> TRANSFERRING -> SUCCESS     pulled; `Delivered`
           each -> FAILED
```

SGLang frees a request's pages as soon as a poll has FAILED, so a publication has it at `Released` and not
before. A reception has it at `Failed`, also where its pages may still be written: `is_quiet` is then False
until `Quiesced`, and SGLang keeps the pages that long.

One rank of a prefill engine, its lead, publishes for all. The others report how far they have written, and
are at SUCCESS once they have written all: SGLang takes the least of all ranks' states, so the lead's decides.
Stages of a pipeline have pages of their own, and their first ranks send them to the lead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

from kvxferd import engine as kv
from kvxferd.errors import Code, KvxferdError
from kvxferd.integrations.sglang.identity import SourceIdentity, room_of, transfer_id

# Rooms that a reader waits for and no request has come for yet: a router sends both at once.
MAX_EARLY_ROOMS = 65_536
# The source is another start than the one that was known: its bootstrap server knows better.
STALE = frozenset(
    {Code.ENGINE_UNKNOWN, Code.GENERATION_STALE, Code.NONCE_WRONG, Code.PEER_UNREACHABLE, Code.NOT_HOME}
)

Blocks = Mapping[str, kv.BlockList]


class State(IntEnum):
    """SGLang's `KVPoll`."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING = 2
    TRANSFERRING = 3
    SUCCESS = 4


class Publication:
    """A request's cache in a prefill engine, on one rank."""

    def __init__(self, owner: RankTransfers, room: int, *, has_reader: bool) -> None:
        self._owner = owner
        self.room = room
        self.has_reader = has_reader
        self.error = ""  # why it failed
        self.has_sent = False
        self.is_concluded = False  # by SGLang
        self._ended: Code | None = None  # how the transfer ended
        self._has_sent_all = False
        self._is_published = False
        self._is_aborted = False
        self._written: dict[int, int] = {}  # tokens, by pipeline stage
        self._after: Any = None  # behind the kernels of this rank

    @property
    def state(self) -> State:
        """What SGLang is to do with the request."""
        if self._is_published and self._ended is None:
            return State.TRANSFERRING
        if self._ended is Code.COMPLETED:
            return State.SUCCESS
        if self._ended is not None or self.error:
            return State.FAILED
        if self._owner.is_lead:
            return State.WAITING if self.has_reader else State.BOOTSTRAPPING
        if self._has_sent_all or (self._is_aborted and self.has_sent):
            return State.SUCCESS  # the lead's state decides
        if self._is_aborted:
            return State.FAILED
        return State.TRANSFERRING if self.has_sent else State.WAITING

    @property
    def is_released(self) -> bool:
        """Whether nobody reads its pages any more, as far as this rank decides it.

        Within a stage its first rank decides for all; of the other stages every rank hears of the end.
        """
        may_be_read = self._is_published or (self._owner.stage > 0 and self.has_sent)
        return not may_be_read or self._ended is not None

    def send(self, blocks: Blocks, num_tokens: int, ready_tokens: int | None, after: Any = None) -> None:
        """Publish so many of the request's tokens as written; None: all of them, and no call follows.

        `blocks`: those of the tokens that no earlier call had, used on the lead alone. `after`: an event
        behind the last kernel that writes them. Raises nothing: the state is then FAILED.
        """
        self.has_sent = True
        self._has_sent_all = ready_tokens is None
        self._after = after
        if self._owner.is_lead:
            self.publish(0, blocks, num_tokens, ready_tokens)
        elif not self._is_over:
            with self._failing():
                self._owner.rank.ready(transfer_id(self.room), ready_tokens, None, after)

    def publish(self, stage: int, blocks: Blocks, num_tokens: int, ready_tokens: int | None) -> None:
        """Publish what a pipeline stage has written, as `send` does: of the lead alone."""
        if self._is_over:
            return
        self._written[stage] = num_tokens if ready_tokens is None else ready_tokens
        written = min(self._written.get(stage, 0) for stage in range(self._owner.num_stages))
        ready = None if written == num_tokens else written
        name = transfer_id(self.room)
        with self._failing():
            if self._is_published:
                self._owner.rank.ready(name, ready, blocks, self._after)
                return
            self._owner.rank.publish(
                name,
                blocks,
                num_tokens,
                lease_s=self._owner.lease_s,
                after=self._after,
                ready_tokens=ready,
                nonce=self._owner.identity.nonce(self.room),
            )
            self._is_published = True

    @property
    def _is_over(self) -> bool:
        return bool(self.error) or self._is_aborted or self._ended is not None

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Have what is refused fail the request."""
        try:
            yield
        except KvxferdError as error:
            self.error = f"{error.message} ({error.code})"
            self.abort(self.error)

    def abort(self, why: str) -> None:
        """Withdraw it. What was published may be read until the state is FAILED. Idempotent."""
        if self._ended is not None:
            return
        if self._owner.is_lead and not self._is_published and not self._is_aborted:
            self._refuse_readers()
        self._is_aborted = True
        if self._owner.is_lead or not self.has_sent:
            self.error = self.error or why
        if self._is_published:
            try:
                self._owner.rank.unpublish(self._owner.identity.reference(self.room))
            except KvxferdError:
                # The session is over: every word is overwritten, and every reader notices it.
                self._ended = Code.PUBLISHER_GONE

    def _refuse_readers(self) -> None:
        """Have pulls that wait for it fail now, and those that come later: it is published and withdrawn."""
        try:
            nonce = self._owner.identity.nonce(self.room)
            self._owner.rank.publish(
                transfer_id(self.room), {}, 1, lease_s=None, after=None, ready_tokens=0, nonce=nonce
            )
            self._owner.rank.unpublish(self._owner.identity.reference(self.room))
        except KvxferdError:
            pass  # the pulls fail at their deadline

    def handle_end(self, why: Code, message: str) -> None:
        """Handle `Released` or `PublishRefused`."""
        self._ended = why
        if why is not Code.COMPLETED:
            self.error = self.error or message


class Reception:
    """A request's cache on its way into a decode engine's pages, on one rank."""

    def __init__(self, owner: RankTransfers, room: int) -> None:
        self._owner = owner
        self.room = room
        self.error = ""
        self.code: Code | None = None  # of the failure
        self.state = State.WAITING
        self._ticket: kv.PullTicket | None = None
        self._in_doubt = False

    @property
    def is_quiet(self) -> bool:
        """Whether nothing writes its pages, nor will."""
        return self._ticket is None and not self._in_doubt

    def pull(self, source: SourceIdentity, blocks: Blocks, num_tokens: int, deadline_s: float) -> None:
        """Begin to read. Raises nothing: the state is then FAILED, and nothing was begun."""
        try:
            ref = source.reference(self.room)
            self._ticket = self._owner.rank.pull(ref, blocks, num_tokens, deadline_s, progressive=True)
        except KvxferdError as error:
            self._fail(error.code, error.message)
            return
        self._owner.receptions[self._ticket] = self
        self.state, self.error, self.code = State.TRANSFERRING, "", None

    def cancel(self) -> None:
        """Request the end. `is_quiet` is True once it is there. Idempotent."""
        if self._ticket is not None:
            self._ticket.cancel()

    def handle_end(self, event: kv.Delivered | kv.Failed) -> None:
        """Handle the pull's terminal event."""
        self._ticket = None
        match event:
            case kv.Delivered():
                self.state = State.SUCCESS
            case kv.Failed():
                self._in_doubt = not event.safe_to_reuse
                self._fail(event.code, event.message)

    def handle_quiesced(self) -> None:
        """Handle `Quiesced`."""
        self._in_doubt = False

    def _fail(self, code: Code, message: str) -> None:
        self.state, self.code, self.error = State.FAILED, code, f"{message} ({code})"


class RankTransfers:
    """The transfers of one rank that have not ended. Used by one thread, SGLang's scheduler."""

    def __init__(
        self,
        rank: kv.RankHandle,
        identity: SourceIdentity,
        *,
        is_lead: bool,
        lease_s: float | None = None,
        stage: int = 0,
        num_stages: int = 1,
    ) -> None:
        self.rank = rank
        self.identity = identity
        self.is_lead = is_lead
        self.lease_s = lease_s
        self.stage, self.num_stages = stage, num_stages
        self.over = ""  # why the session is over; it is not while this is empty
        self.receptions: dict[kv.PullTicket, Reception] = {}
        self._publications: dict[int, Publication] = {}
        self._readers: OrderedDict[int, bool] = OrderedDict()  # of rooms without a request: False: given up

    def open_publication(self, room: int) -> Publication:
        """Return a request's publication. A reader may have come already, or have gone."""
        reader = self._readers.pop(room, None)
        publication = Publication(self, room, has_reader=reader is True)
        before = self._publications.get(room)
        if self.over:
            publication.abort(self.over)
        elif reader is False:
            publication.abort("the decode engine has given the request up")
        elif before is not None and not before.is_released:
            publication.abort(
                f"room {room} is in use: an earlier request of it is not released; give each its own room"
            )
            return publication
        self._publications[room] = publication
        return publication

    def handle_reader(self, room: int) -> None:
        """Handle that a decode rank pulls the room."""
        if (publication := self._publications.get(room)) is not None:
            publication.has_reader = True
        else:
            self._remember_reader(room, True)

    def handle_reader_gone(self, room: int) -> None:
        """Handle that a decode rank does not want the room any more."""
        if (publication := self._publications.get(room)) is not None:
            publication.abort("the decode engine has given the request up")
        else:
            self._remember_reader(room, False)

    def handle_stage(
        self, room: int, stage: int, blocks: Blocks, num_tokens: int, ready_tokens: int | None
    ) -> None:
        """Handle what the first rank of another stage has written: on the lead."""
        if (publication := self._publications.get(room)) is not None:
            publication.publish(stage, blocks, num_tokens, ready_tokens)

    def is_quiet(self, room: int) -> bool:
        """Whether no pull of the room writes, nor will."""
        return all(one.is_quiet for one in self.receptions.values() if one.room == room)

    def forget(self, publication: Publication) -> None:
        """Forget a publication that SGLang has concluded, once it cannot be read any more."""
        publication.is_concluded = True
        if publication.is_released and self._publications.get(publication.room) is publication:
            del self._publications[publication.room]

    def pump(self) -> None:
        """Handle the events that have come."""
        for event in self.rank.poll():
            match event:
                case kv.Released():
                    self._end(event.transfer_id, event.why, f"released: {event.why}")
                case kv.PublishRefused():
                    self._end(event.transfer_id, event.code, f"{event.message} ({event.code})")
                case kv.Delivered() | kv.Failed():
                    reception = self.receptions[event.ticket]
                    reception.handle_end(event)
                    if reception.is_quiet:
                        del self.receptions[event.ticket]
                case kv.Quiesced():
                    self.receptions.pop(event.ticket).handle_quiesced()
                case kv.Suspended():
                    pass  # whoever has asked for it looks at the rank
                case kv.Disconnected():
                    self._handle_over(event)

    def _end(self, transfer: str, why: Code, message: str) -> None:
        room = room_of(transfer)
        if room is not None and (publication := self._publications.get(room)) is not None:
            publication.handle_end(why, message)
            if publication.is_concluded:
                self.forget(publication)

    def _handle_over(self, event: kv.Disconnected) -> None:
        self.over = (
            f"the session with the daemon is over: {event.message} ({event.code}); restart this engine"
        )
        for publication in list(self._publications.values()):
            publication.abort(self.over)

    def _remember_reader(self, room: int, pulls: bool) -> None:
        self._readers[room] = pulls and self._readers.get(room, True)
        if len(self._readers) > MAX_EARLY_ROOMS:
            self._readers.popitem(last=False)
