"""Who reads a transfer: it is over when as many engines as it names have all of it, or read it no more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvxferd.errors import Code
from tests.property.simulation.oracle import Violation

if TYPE_CHECKING:
    from tests.property.simulation.process import Process

BY_READERS = frozenset({Code.COMPLETED, Code.ABANDONED})


@dataclass
class _Reader:
    num_ranks: int
    ranks: set[int] = field(default_factory=set)  # whose movers have reported all bytes
    has_abandoned: bool = False


class Readers:
    """The engines, by id and generation, that read one transfer."""

    def __init__(self, num_readers: int) -> None:
        self._num_readers = num_readers
        self._readers: dict[tuple[str, str], _Reader] = {}

    def _reader_of(self, process: Process) -> _Reader:
        spec = process.spec
        assert spec is not None
        return self._readers.setdefault((spec.engine_id, spec.generation), _Reader(spec.tp_size))

    def landed(self, process: Process) -> None:
        """A rank's mover reports that a pull is delivered."""
        assert process.spec is not None
        self._reader_of(process).ranks.add(process.spec.tp_rank)

    def abandoned(self, process: Process) -> None:
        """A rank's engine reads no more of it."""
        self._reader_of(process).has_abandoned = True

    @property
    def num_done(self) -> int:
        """How many engines do not need it any more."""
        readers = self._readers.values()
        return sum(one.has_abandoned or len(one.ranks) >= one.num_ranks for one in readers)

    def check_released(self, transfer_id: str, why: Code) -> None:
        """Raise Violation where its readers are the reason of a release, and are not done."""
        if why in BY_READERS and self.num_done < self._num_readers:
            text = f"{transfer_id} was released as {why}: {self.num_done} of {self._num_readers} are done"
            raise Violation("violations", text)
