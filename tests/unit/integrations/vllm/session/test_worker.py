"""The connector in a worker: what ends is reported for the request whose pull it was."""

from __future__ import annotations

import pytest

from kvxferd.client import Delivered, Event, Failed, PullTicket, Quiesced
from kvxferd.errors import Code
from kvxferd.ids import Endpoint, EngineId, Generation, Ticket, TransferId
from kvxferd.integrations.vllm.session.step_metadata import PullSpec, StepMetadata
from kvxferd.integrations.vllm.session.worker import ConnectorWorker, Results
from kvxferd.wire.common import TransferRef

REF = TransferRef(Endpoint("tcp://p:1"), EngineId("e"), Generation("g"), TransferId("t"), "ab" * 16)


class Rank:
    """A rank handle whose events a test gives."""

    is_connected = True

    def __init__(self) -> None:
        self.tickets: list[PullTicket] = []
        self.events: list[Event] = []

    def pull(self, *_: object, **__: object) -> PullTicket:
        self.tickets.append(PullTicket(Ticket(len(self.tickets) + 1), TransferId("t"), lambda ticket: None))
        return self.tickets[-1]

    def poll(self) -> list[Event]:
        events, self.events = self.events, []
        return events


@pytest.mark.parametrize("is_quiesced", [True, False], ids=["its blocks are quiet", "it was delivered"])
def test_a_request_that_comes_again_is_received_with_its_own_pull(is_quiesced: bool) -> None:
    """Its first pull has failed in doubt, or is delivered late: the second still writes its blocks."""
    rank = Rank()
    worker = ConnectorWorker(rank, 10.0)  # type: ignore[arg-type]
    for _ in range(2):
        worker.start_step(StepMetadata(pulls=[PullSpec("r", REF, {}, 1)]))
    first, second = rank.tickets
    rank.events = [Delivered(first, 1, 1, 0.1)]
    if is_quiesced:
        failed = Failed(first, Code.DEADLINE, "late", {}, safe_to_reuse=False)
        rank.events = [failed, Quiesced(first, {})]
    assert worker.collect_results() == Results()
    rank.events = [Delivered(second, 1, 1, 0.1)]
    assert worker.collect_results() == Results(received={"r"})
