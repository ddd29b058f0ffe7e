"""What a mover does for readers that have it pack: the real source of gathered reads, and its time."""

from __future__ import annotations

import random
from collections.abc import Callable

from kvxferd.ids import AgentName
from kvxferd.mover.process.chunks import ChunkPool
from kvxferd.mover.process.gather_source import HEADER_BYTES, GatherSource
from kvxferd.mover.process.pull_engine import PullEngine
from kvxferd.mover.transport.staging import StagedTransport
from kvxferd.wire import mover as mv
from kvxferd.wire.staging import GatherMessage, GatherReady, GatherRefused
from tests.property.simulation.agenda import Agenda
from tests.property.simulation.memory import POISON
from tests.property.simulation.oracle import Violation
from tests.property.simulation.transport import SimulatedTransport

OTHER_BYTES = 1 << 16  # what another reader has packed; more than any pull here
LOOKS_S = (0.00002, 0.0002, 0.005)  # of one mover: how much time passes between two looks at its clock


class PackClock:
    """A mover's clock while it packs, which takes time: whoever steps it next must wait for that."""

    def __init__(self, agenda: Agenda, look_s: float) -> None:
        self._agenda = agenda
        self._look_s = look_s
        self.busy_until = 0.0

    def __call__(self) -> float:
        """Return the time, and let some pass."""
        now = max(self._agenda.now, self.busy_until)
        self.busy_until = now + self._look_s
        return now


class Packing:
    """One mover's source of packed bytes."""

    def __init__(
        self,
        agenda: Agenda,
        rng: random.Random,
        transport: SimulatedTransport,
        staged: StagedTransport,
        chunks: ChunkPool,
        engine: PullEngine,
    ) -> None:
        self.clock = PackClock(agenda, rng.choice(LOOKS_S))
        self.source = GatherSource(transport, chunks, staged.reply_agents, self.clock)
        self._engine = engine
        self._revoked: dict[bytes, None] = {}
        self._stamped: dict[bytes, object] = {}  # by stamp: the loan that had it
        self.on_packing: Callable[[], None] = lambda: None  # called while a request is being packed
        staged.on_gather = self._handle

    def _handle(self, agent: AgentName, message: GatherMessage) -> None:
        if isinstance(message, GatherReady | GatherRefused):
            self._engine.handle_gather_reply(agent, message)
        else:
            self.source.handle(agent, message)

    def set_granted(self, message: mv.GrantBlocks | mv.RevokeBlocks) -> None:
        """Pack a transfer's blocks from now on, or no more."""
        if isinstance(message, mv.GrantBlocks):
            self._revoked.pop(message.word, None)
            self.source.grant(message)
        else:
            self._revoked[message.word] = None
            self.source.revoke(message.word)
            self._check_revoked()

    def _check_revoked(self) -> None:
        if any(loan.request.word in self._revoked for loan in self.source._packing):
            raise Violation("violations", "a mover packs for a word that was revoked")

    def _check_stamps(self) -> None:
        for loan in self.source._loans.values():
            if self._stamped.setdefault(loan.stamp, loan) is not loan:
                raise Violation("violations", "two loans of a mover have one stamp")

    def take_back(self, address: int) -> None:
        """End the loan of the chunk at an address, and pack other bytes there."""
        for loan in list(self.source._loans.values()):
            chunk = loan.chunk
            if chunk is None or not loan.expires_at:
                continue
            if chunk.address <= address < chunk.address + chunk.span.size_bytes:
                self.source._end(loan)
                chunk.bytes[HEADER_BYTES : HEADER_BYTES + OTHER_BYTES] = POISON

    @property
    def is_packing(self) -> bool:
        """Whether it has something to do that waits for nothing."""
        source = self.source
        return bool(source._packing or source._early or source._overdue)

    @property
    def is_busy(self) -> bool:
        """Whether it has something to do, now or when a loan ends."""
        return self.source.is_busy or self.source.has_loans

    @property
    def num_left(self) -> int:
        """How many grants, requests and loans it has."""
        return len(self.source._grants) + len(self.source._waiting) + len(self.source._loans)

    def step(self) -> None:
        """Pack for a while. The mover may be dead, or stopped, when it returns."""
        self.source.step()
        if self.source._packing:
            self.on_packing()
        self._check_revoked()
        self._check_stamps()
