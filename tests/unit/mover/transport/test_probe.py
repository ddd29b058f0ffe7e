"""A registered span is proved by a read that is checked, also over a transport that goes wrong."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

import pytest

from kvxferd.ids import AgentName
from kvxferd.mover.transport.base import HOST, MemoryRange, ReadHandle, ReadKinds, TransportError
from kvxferd.mover.transport.probe import LIMIT_S, TIMED_BYTES, ProbeOutcome, probe_span
from kvxferd.plan import Runs
from tests.support.memory_transport import Fabric, MemoryTransport

SIZE = 4 * TIMED_BYTES
ME = AgentName("me")
CONTENTS = {"random": os.urandom(SIZE), "zeros": bytes(SIZE), "less than a sample": os.urandom(100)}


class Rank:
    """Memory, and what it held before the probe."""

    def __init__(self, content: bytes) -> None:
        self.page = mmap.mmap(-1, len(content))
        self.page[:] = self.content = content
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.page))

    def probe(self, transport: MemoryTransport) -> ProbeOutcome:
        span = MemoryRange(self.address, len(self.content))
        transport.register(span)
        return probe_span(transport, span)


@pytest.fixture(params=CONTENTS)
def rank(request: pytest.FixtureRequest) -> Iterator[Rank]:
    made = Rank(CONTENTS[request.param])
    yield made
    assert made.page[:] == made.content, "the probe wrote into what it proved"
    made.page.close()


def test_memory_that_is_read_rightly_is_proved_and_timed(rank: Rank) -> None:
    proof = rank.probe(MemoryTransport(Fabric(), ME))
    assert (proof.ok, proof.why, proof.over_tcp) == (True, "", False)
    assert proof.gigabytes_per_s > 0


class Empty(MemoryTransport):
    """Reads say that they are done, and bring nothing."""

    def post(self, agent: AgentName, runs: Runs, kinds: ReadKinds = HOST) -> ReadHandle:
        return super().post(agent, Runs(runs.local, runs.local, runs.length), kinds)


def test_other_bytes_are_no_proof_even_where_all_are_zeros(rank: Rank) -> None:
    proof = rank.probe(Empty(Fabric(), ME))
    assert not proof.ok
    assert "bytes other than those that lie there" in proof.why
    assert proof.gigabytes_per_s == 0


def test_a_read_that_fails_is_the_reason_and_not_for_ever(rank: Rank) -> None:
    fabric = Fabric(polls_per_read=1, errors={ME: TransportError("cannot read: no route", settled=True)})
    transport = MemoryTransport(fabric, ME)
    assert rank.probe(transport).why == "cannot read: no route"
    assert rank.probe(transport).ok


def test_a_read_that_never_ends_is_not_waited_for_and_its_landing_is_kept() -> None:
    rank = Rank(CONTENTS["random"])
    transport = MemoryTransport(Fabric(polls_per_read=1, stalled={ME}), ME)
    assert f"not ended after {LIMIT_S:g} s" in rank.probe(transport).why
    kept = [span.size_bytes for span in transport._spans if span.address != rank.address]
    assert kept == [TIMED_BYTES], "what may be written to stays"
    rank.page.close()


def test_live_memory_is_looked_at_again(rank: Rank) -> None:
    class Live(MemoryTransport):
        """The engine writes between our look and the read, once."""

        wrote = False

        def post(self, agent: AgentName, runs: Runs, kinds: ReadKinds = HOST) -> ReadHandle:
            if not self.wrote:
                self.wrote = True
                rank.page[:50] = new = b"\x55" * 50
                rank.content = new + rank.content[50:]
            return super().post(agent, runs, kinds)

    assert rank.probe(Live(Fabric(), ME)).ok
