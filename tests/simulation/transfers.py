"""What engines publish and pull, as all of the simulation knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvxferd import client
from kvxferd.errors import Code
from kvxferd.ids import EngineId, Generation, TransferId
from kvxferd.wire.common import RefLike
from tests.simulation.contents import Lists

if TYPE_CHECKING:
    from tests.simulation.worker import Worker

REGISTER_S, LATE_REGISTER_S = 2.0, 20.0
RETURN_S = 0.5  # after which a pull's failure is known on each side
MAX_HOLD_S = 20.0  # that a prepared grant keeps a transfer, and a progressive pull waits for its source
LEASE_S = 8.0  # of a transfer that names none, and of a grant


class Kernels:
    """GPU work that was launched; see `kvxferd.client.gpu_events.Completion`."""

    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        """Whether it is done."""
        return self.is_done


@dataclass(eq=False)
class Transfer:
    """What was published."""

    number: int
    transfer_id: str
    lists: Lists
    num_tokens: int
    num_readers: int
    lease_s: float
    workers: list[Worker]  # of its generation
    publisher: Worker
    steps: list[int]  # how many tokens are ready at the publish, and then; one: it is whole at once
    parts: list[Lists]  # what the publisher lists with each
    ref: client.TransferRef | None = None
    published_at: float = 0.0
    added_at: float = 0.0  # when its publisher has last listed blocks, which begins its lease anew
    released: dict[Worker, Code] = field(default_factory=dict)
    released_at: dict[Worker, float] = field(default_factory=dict)  # since when they may have heard
    freed: set[Worker] = field(default_factory=set)  # whose blocks of it are used for something else
    refused: Code | None = None
    reported: set[Worker] = field(default_factory=set)  # whose ranks have all written
    is_listed: bool = True  # a scheduler has added all its blocks
    is_whole: bool = False  # so have all ranks
    whole_at: float = 0.0
    is_withdrawn: bool = False  # its engine has unpublished it, or an operator has cancelled it
    is_cancelled: bool = False  # by an operator
    is_of_liar: bool = False  # a node that lies publishes it, or reads it
    is_pulled_once: bool = False  # a pull that fails is not repeated
    reads_hang: bool = False  # so nobody has it soon
    is_unheard: bool = False  # it ended, maybe before any daemon had it
    delivered: dict[str, set[Worker]] = field(default_factory=dict)  # by reading generation
    abandoned: set[str] = field(default_factory=set)
    pulls: list[Pull] = field(default_factory=list)
    prepared: dict[Worker, float] = field(default_factory=dict)  # since when, by ranks that have not pulled
    last_read: float = 0.0  # when a pull of it has last ended
    last_returned: float = 0.0  # when one that failed gave its grant back, and the lease ran anew
    is_read_early: bool = False  # each pull of it is progressive
    at_delivery: Callable[[Worker], None] = lambda worker: None  # as a rank hears that it has it
    last_step_s: float = 0.0  # from the step before to the last one, on each rank; 0: it is drawn

    def grant_returned(self, now: float) -> None:
        """Note that a pull gives its grant back: it failed, or its doubt has ended."""
        if now < self.published_at + MAX_HOLD_S + RETURN_S:
            self.last_returned = now

    @property
    def name(self) -> tuple[EngineId, Generation, TransferId]:
        """Its name among all."""
        source = self.publisher
        return EngineId(source.engine.shape.name), Generation(source.generation), TransferId(self.transfer_id)

    @property
    def handed_on(self) -> RefLike:
        """Its reference, in the form in which this one's router hands it on."""
        assert self.ref is not None
        return (self.ref, self.ref.to_dict(), self.ref.to_json())[self.number % 3]

    @property
    def is_over(self) -> bool:
        """Whether one rank has heard so."""
        return bool(self.released) or self.refused is not None

    def is_prepared(self, now: float) -> bool:
        """Whether a rank has announced a pull of it that has not come, so that its daemon holds it."""
        # Its client keeps it until the rank is registered again.
        held_s = LATE_REGISTER_S + MAX_HOLD_S
        return any(worker.is_alive and now < at + held_s for worker, at in self.prepared.items())

    def num_done(self) -> int:
        """How many engines have it, or need it no more."""
        whole = {
            engine
            for engine, workers in self.delivered.items()
            if len(workers) == next(iter(workers)).engine.num_ranks
        }
        return len(whole | self.abandoned)


@dataclass(eq=False)
class Pull:
    """One attempt of one rank to get a transfer."""

    worker: Worker
    transfer: Transfer
    lists: Lists
    began: float
    deadline_s: float
    is_progressive: bool
    wanted: Wanted
    kernels: Kernels
    ticket: client.PullTicket | None = None
    ended: str = ""  # delivered, failed, in-doubt
    why: str = ""  # it has failed
    is_quiesced: bool = False
    is_cancelled: bool = False
    is_given_up: bool = False  # by its client's own timer, because the daemon was silent

    @property
    def deadline(self) -> float:
        """When it may end for its lateness."""
        return self.began + (min(self.deadline_s, MAX_HOLD_S) if self.is_progressive else self.deadline_s)

    @property
    def ends_by(self) -> float:
        """When it has ended at the latest: a progressive one may wait for its source before."""
        return self.began + self.deadline_s + (MAX_HOLD_S if self.is_progressive else 0.0)


@dataclass(eq=False)
class Wanted:
    """What one rank is to get of one transfer, in however many attempts."""

    attempts: int = 0
    is_delivered: bool = False


def ids_of(listed: Iterable[Lists]) -> set[int]:
    """Return all block ids of some lists."""
    return {block for lists in listed for one in lists.values() for block in one.ids}
