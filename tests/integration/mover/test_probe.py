"""A registered span is proved by a read that is checked: over NIXL, and over a transport that goes wrong."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvxferd.ids import AgentName
from kvxferd.mover.transport.base import HOST, MemoryRange, ReadHandle, ReadKinds, TransportError
from kvxferd.mover.transport.probe import LIMIT_S, TIMED_BYTES, probe_span
from kvxferd.mover.ucx_settings import tls_with_cuda
from kvxferd.plan import Runs
from tests.support.devices import used_bytes
from tests.support.fake_driver import FakeDriver
from tests.support.memory_transport import Fabric, MemoryTransport
from tests.support.mover_harness import MARK

SIZE = 4 * TIMED_BYTES
ME = AgentName("me")


class Rank:
    """Registered memory, and what it held before the probe."""

    def __init__(self, content: bytes) -> None:
        self.page = mmap.mmap(-1, len(content))
        self.page[:] = content
        anchor = ctypes.c_char.from_buffer(self.page)
        self.span = MemoryRange(ctypes.addressof(anchor), len(content))
        self.content = content


@pytest.fixture(params=["random", "zeros", "less than a sample"])
def rank(request: pytest.FixtureRequest) -> Iterator[Rank]:
    content = {"random": os.urandom(SIZE), "zeros": bytes(SIZE), "less than a sample": os.urandom(100)}
    made = Rank(content[request.param])
    yield made
    assert made.page[:] == made.content, "the probe wrote into what it proved"
    made.page.close()


def registered(rank: Rank, transport: MemoryTransport) -> MemoryTransport:
    transport.register(rank.span)
    return transport


def test_memory_that_is_read_rightly_is_proved_and_timed(rank: Rank) -> None:
    proof = probe_span(registered(rank, MemoryTransport(Fabric(), ME)), rank.span)
    assert (proof.ok, proof.why, proof.over_tcp) == (True, "", False)
    assert proof.gigabytes_per_s > 0


class Shifted(MemoryTransport):
    """Reads come from the wrong place, and say nothing."""

    def post(self, agent: AgentName, runs: Runs, kinds: ReadKinds = HOST) -> ReadHandle:
        ctypes.memset(int(runs.local[0]), 1, int(runs.length[0]))
        handle = super().post(agent, Runs(runs.local, runs.local, runs.length), kinds)
        return handle


class Empty(MemoryTransport):
    """Reads say that they are done, and bring nothing."""

    def post(self, agent: AgentName, runs: Runs, kinds: ReadKinds = HOST) -> ReadHandle:
        return super().post(agent, Runs(runs.local, runs.local, runs.length), kinds)


@pytest.mark.parametrize("broken", [Shifted, Empty])
def test_other_bytes_are_no_proof_even_where_all_are_zeros(rank: Rank, broken: type[MemoryTransport]) -> None:
    proof = probe_span(registered(rank, broken(Fabric(), ME)), rank.span)
    assert not proof.ok
    assert "bytes other than those that lie there" in proof.why
    assert proof.gigabytes_per_s == 0


def test_a_read_that_fails_is_the_reason(rank: Rank) -> None:
    fabric = Fabric(polls_per_read=1, errors={ME: TransportError("cannot read: no route", settled=True)})
    transport = registered(rank, MemoryTransport(fabric, ME))
    assert probe_span(transport, rank.span).why == "cannot read: no route"
    assert probe_span(transport, rank.span).ok, "one fault is not for ever"


def test_a_read_that_never_ends_is_not_waited_for_and_its_landing_is_kept() -> None:
    rank = Rank(os.urandom(SIZE))
    fabric = Fabric(polls_per_read=1, stalled={ME})
    transport = registered(rank, MemoryTransport(fabric, ME))
    proof = probe_span(transport, rank.span)
    assert f"not ended after {LIMIT_S:g} s" in proof.why
    registered_now = transport._spans - {rank.span}
    assert [span.size_bytes for span in registered_now] == [TIMED_BYTES], "what may be written to stays"
    rank.page.close()


def test_what_is_not_registered_is_not_proved() -> None:
    rank = Rank(os.urandom(SIZE))
    assert "not registered" in probe_span(MemoryTransport(Fabric(), ME), rank.span).why
    rank.page.close()


def test_live_memory_is_looked_at_again(rank: Rank) -> None:
    class Live(MemoryTransport):
        """The engine writes between our look and the read, once."""

        wrote = False

        def post(self, agent: AgentName, runs: Runs, kinds: ReadKinds = HOST) -> ReadHandle:
            if not self.wrote:
                self.wrote = True
                new = b"\x55" * 50
                rank.page[:50] = new
                rank.content = new + rank.content[50:]
            return super().post(agent, runs, kinds)

    assert probe_span(registered(rank, Live(Fabric(), ME)), rank.span).ok


def test_device_memory_is_looked_at_by_copies_and_nothing_of_it_is_kept() -> None:
    driver = FakeDriver()
    uuid = driver.devices()[1].uuid
    transport = MemoryTransport(Fabric(), ME)
    address = driver.reserve(SIZE)
    handle = driver.create(uuid, SIZE)
    driver.map(address, SIZE, handle)
    driver.set_access(uuid, address, SIZE)
    content = os.urandom(SIZE)
    ctypes.memmove(address, content, SIZE)
    span = MemoryRange(address, SIZE, driver.mem_type, driver.device(uuid).ordinal)
    transport.register(span)
    used = used_bytes(driver, uuid)
    proof = probe_span(transport, span, driver)
    assert (proof.ok, proof.why) == (True, "")
    assert ctypes.string_at(address, SIZE) == content
    assert used_bytes(driver, uuid) == used
    broken = Empty(Fabric(), ME)
    broken.register(span)
    assert "other than those that lie there" in probe_span(broken, span, driver).why
    driver.unmap(address, SIZE)
    assert not probe_span(transport, span, driver).ok, "what is not there is a finding, not a crash"
    driver.unreserve(address, SIZE)
    driver.release(handle)


_SCRIPT = """
import ctypes, json, mmap, os, time
from kvxferd.mover.transport.nixl import NixlTransport, import_library
from kvxferd.mover.transport.probe import probe_span
from kvxferd.mover.transport.base import MemoryRange
transport = NixlTransport(import_library(), "me")
page = mmap.mmap(-1, 4 << 20)
page[:] = os.urandom(len(page))
span = MemoryRange(ctypes.addressof(ctypes.c_char.from_buffer(page)), len(page))
transport.register(span)
began = time.perf_counter()
proof = probe_span(transport, span)
print(json.dumps([proof.ok, proof.why, proof.over_tcp, proof.gigabytes_per_s, time.perf_counter() - began]))
os._exit(0)
"""


@pytest.mark.parametrize("transports", ["", "tcp"])
def test_nixl_is_proved_and_tcp_is_told_from_what_is_faster(transports: str) -> None:
    environment = {**os.environ, "KVXFERD_TEST": MARK} | (
        {"UCX_TLS": tls_with_cuda(transports)} if transports else {}
    )
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    ok, why, over_tcp, speed, elapsed_s = json.loads(done.stdout.splitlines()[-1])
    assert (ok, why) == (True, "")
    assert over_tcp == (transports == "tcp")
    assert speed > 0.01
    assert elapsed_s < 2 * LIMIT_S
