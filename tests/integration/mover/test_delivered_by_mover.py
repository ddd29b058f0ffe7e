"""A mover says Delivered to its worker itself, and its daemon says it where it cannot."""

from __future__ import annotations

import dataclasses
import os
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from io import FileIO
from typing import Any

import pytest

from kvxferd.errors import Code
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import MOVER_DELIVERIES
from kvxferd.wire.limits import MAX_DELIVERY_BYTES
from kvxferd.wire.mover import Bind, BindRefused, PiecesRead
from tests.support.mover_harness import WORD, Connect, Node, Worker, serve, sink
from tests.support.nodes.processes import num_fds

Make = Callable[..., Worker]


@pytest.mark.parametrize("before", [None, PiecesRead(bytes=1 << 40, runs=7, wire_s=2.0)])
async def test_the_worker_hears_of_what_is_delivered_with_the_pieces_before(
    node: Node, connect: Connect, before: PiecesRead | None
) -> None:
    source, reader = await connect(node, node)
    number = reader.start([source], source.place(0, WORD), [1, 2], [3, 4], before=before)
    outcome = await reader.outcome(number)
    assert outcome.delivered
    assert outcome.sent_to_worker
    assert outcome.bytes < 1 << 40  # the daemon gets those of the piece, and adds them up itself
    known = before or PiecesRead(bytes=0, runs=0, wire_s=0.0)
    assert MOVER_DELIVERIES.decode(reader.worker.deliveries.recv(MAX_DELIVERY_BYTES)) == wk.TicketDelivered(
        ticket=number + 1000,
        bytes=known.bytes + outcome.bytes,
        runs=known.runs + outcome.runs,
        wire_s=known.wire_s + outcome.wire_s,
    )


async def test_of_what_failed_the_daemon_speaks(node: Node, connect: Connect) -> None:
    source, reader = await connect(node, node)
    source.page.overwrite(0)
    outcome = await reader.read(source, [1], [3])
    assert outcome.code is Code.RELEASED
    assert not outcome.sent_to_worker
    with pytest.raises(BlockingIOError):
        reader.worker.deliveries.recv(MAX_DELIVERY_BYTES)


@contextmanager
def full_socket() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    with ours, theirs:
        with suppress(BlockingIOError):
            while True:
                theirs.send(b"x")
        yield theirs


@pytest.mark.parametrize(
    "make",
    [full_socket, select.epoll, lambda: FileIO(os.open("/dev/null", os.O_PATH))],
    ids=["a full socket", "epoll", "a path"],
)
async def test_what_takes_no_packet_leaves_it_to_the_daemon(
    node: Node, make_worker: Make, make: Callable[[], AbstractContextManager[Any]]
) -> None:
    source = await serve(node, make_worker("P"))
    source.page.write(0, WORD)
    rank = make_worker("D")
    with make() as other:
        reader = await sink(node, dataclasses.replace(rank, mover_end=other), [source])
        outcome = await reader.read(source, [1], [3])
    assert outcome.delivered
    assert not outcome.sent_to_worker
    source.close()


async def test_a_second_bind_leaves_the_socket_of_the_first(node: Node, connect: Connect) -> None:
    source, reader = await connect(node, node)
    assert (await reader.read(source, [1], [3])).sent_to_worker
    reader.worker.deliveries.recv(MAX_DELIVERY_BYTES)
    before = num_fds(reader.mover.pid)  # connected by now
    others_end, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    with others_end, others:
        again = Bind(regions=reader.worker.export())
        reader.mover.send(again, (reader.worker.memory.fd, others.fileno(), reader.worker.pidfd))
        assert (await node.received(reader.mover, BindRefused)).code is Code.OUT_OF_PLACE
    assert num_fds(reader.mover.pid) == before
    outcome = await reader.read(source, [1], [3])
    assert outcome.sent_to_worker
    assert MOVER_DELIVERIES.decode(reader.worker.deliveries.recv(MAX_DELIVERY_BYTES))
