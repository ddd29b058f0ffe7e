"""A worker of version 1, spoken from 0.1's recorded frames, with a real daemon, real movers and NIXL."""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest

from kvxferd.memory import SealedMemory
from kvxferd.wire.framing import FrameDecoder, encode_frame
from kvxferd.wire.limits import FENCE_PAGE_BYTES
from tests.support import schema_0_1
from tests.support.frames_0_1 import frames
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.waiting import wait_until

WAIT_S = 20.0
SESSION = {recorded.name: recorded for recorded in frames("session")}
BLOCK_BYTES = 16 * 2 * 16 * 8  # tokens, bytes, head_dim, heads: of one component of one layer


class WorkerByHand:
    """Sends recorded frames and decodes answers as 0.1 did."""

    def __init__(self, path: str) -> None:
        self._given_back = ExitStack()
        self._socket = self._given_back.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self._socket.connect(path)
        self._decoder = FrameDecoder()
        self._heard: deque[tuple[msgspec.Struct, tuple[int, ...]]] = deque()
        self.page = self._given_back.enter_context(_memory(FENCE_PAGE_BYTES))
        self.pidfds: list[int] = []

    def say(self, name: str, *fds: int, frame: bytes = b"") -> None:
        assert len(fds) == SESSION[name].num_fds
        socket.send_fds(self._socket, [frame or SESSION[name].frame], list(fds))

    def heard(self, kind: type[msgspec.Struct]) -> msgspec.Struct:
        """Return the next message, which must be of that kind; a mover's pidfd is kept."""
        deadline = time.monotonic() + WAIT_S
        while not self._heard:
            ready, _, _ = select.select([self._socket], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {kind.__name__}"
            chunk, fds, _, _ = socket.recv_fds(self._socket, 1 << 16, 253)
            assert chunk, f"the daemon ended the connection instead of {kind.__name__}"
            for frame in self._decoder.feed(chunk, fds):
                self._heard.append((schema_0_1.DAEMON.decode(frame.payload), frame.fds))
        message, fds = self._heard.popleft()
        for fd in fds:
            self._given_back.callback(os.close, fd)
        self.pidfds += fds
        assert isinstance(message, kind), message
        return message

    def register(self, name: str, memory: SealedMemory) -> schema_0_1.Registered:
        self.say("hello", self.page.fd)
        assert self.heard(schema_0_1.Welcome).version == 1
        self.say(f"register {name}", memory.fd)
        registered = self.heard(schema_0_1.Registered)
        assert isinstance(registered, schema_0_1.Registered)
        assert len(self.pidfds) == 1
        return registered

    def close(self) -> None:
        self._given_back.close()


def _memory(size_bytes: int) -> SealedMemory:
    return SealedMemory.create(size_bytes, "by-hand")


def _size_of(name: str) -> int:
    register = schema_0_1.CLIENT.decode(SESSION[f"register {name}"].payload)
    assert isinstance(register, schema_0_1.Register)
    return register.regions[0].size_bytes


@pytest.fixture
def given_back() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_hello_register_publish_pull_suspend_resume(fleet: Fleet, given_back: ExitStack) -> None:
    daemon = fleet.shared("node")
    memories = {name: given_back.enter_context(_memory(_size_of(name))) for name in ("prefill", "decode")}
    workers = {name: WorkerByHand(daemon.worker_socket) for name in memories}
    for worker in workers.values():
        given_back.callback(worker.close)
    source, sink = workers["prefill"], workers["decode"]
    endpoint = source.register("prefill", memories["prefill"]).endpoint
    sink.register("decode", memories["decode"])

    memories["prefill"].buffer[:] = bytes(range(256)) * (_size_of("prefill") // 256)
    source.page.buffer[:16] = os.urandom(16)
    source.say("publish")
    sink.say("pull", frame=_pull_from(endpoint))
    assert sink.heard(schema_0_1.Delivered).ticket == 1
    _check_blocks(memories["prefill"].buffer, memories["decode"].buffer)
    assert source.heard(schema_0_1.Released).why is schema_0_1.Code.COMPLETED
    assert bytes(source.page.buffer[:16]) != bytes(16)

    sink.say("suspend")
    sink.heard(schema_0_1.Suspended)
    assert select.select(sink.pidfds, [], [], WAIT_S)[0] == sink.pidfds, "its mover is not dead"
    fresh = given_back.enter_context(_memory(_size_of("decode")))
    sink.say("resume decode", fresh.fd)
    assert sink.heard(schema_0_1.Registered).request == 2
    assert len(sink.pidfds) == 2

    for worker in workers.values():
        worker.close()
    wait_until(lambda: not daemon.status()["engines"], "both ranks gone")


def _pull_from(endpoint: str) -> bytes:
    """The recorded pull, with the one thing in it that was not known when it was recorded."""
    pull = schema_0_1.CLIENT.decode(SESSION["pull"].payload)
    assert isinstance(pull, schema_0_1.Pull)
    ref = msgspec.structs.replace(pull.ref, endpoint=endpoint)
    return encode_frame(msgspec.msgpack.encode(msgspec.structs.replace(pull, ref=ref)))


def _check_blocks(source: memoryview, sink: memoryview) -> None:
    """Each whole block of each tensor is where the pull asked for it."""
    publish = schema_0_1.CLIENT.decode(SESSION["publish"].payload)
    pull = schema_0_1.CLIENT.decode(SESSION["pull"].payload)
    layout = schema_0_1.CLIENT.decode(SESSION["register decode"].payload).layout
    there, here = (memoryview(m.blocks["full"].ids).cast("i") for m in (publish, pull))
    whole = pull.num_tokens // layout.groups[0].block_tokens
    for tensor in layout.tensors:
        for theirs, ours in list(zip(there, here, strict=True))[:whole]:
            at, to = (tensor.offset + block * tensor.block_stride for block in (theirs, ours))
            assert source[at : at + BLOCK_BYTES] == sink[to : to + BLOCK_BYTES]


def test_a_version_that_nobody_speaks_is_told_to_upgrade(fleet: Fleet, given_back: ExitStack) -> None:
    worker = WorkerByHand(fleet.shared("node").worker_socket)
    given_back.callback(worker.close)
    future = {"t": "hello", "versions": [7, 9], "client": {"name": "x"}, "shape": "another"}
    worker.say("hello", worker.page.fd, frame=encode_frame(msgspec.msgpack.encode(future), 1))
    farewell = worker.heard(schema_0_1.Farewell)
    assert isinstance(farewell, schema_0_1.Farewell)
    assert farewell.code is schema_0_1.Code.BAD_VERSION
    assert "upgrade the older" in farewell.message
