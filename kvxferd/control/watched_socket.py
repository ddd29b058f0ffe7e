"""A ZMQ socket on the loop: its messages are read in turns, each given to a callback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog
import zmq

from kvxferd.control.turns import MESSAGES_PER_TURN, PEERS, Turns

log = structlog.get_logger()

# A request of ZAP has 9 to 11 parts, every other message one. More are read in turns of 3 ms, and dropped.
MAX_PARTS, PARTS_PER_TURN = 16, 1000
# Plain integers: `value & zmq.POLLIN` takes 1.8 us, these 0.1 us. `recv_multipart` uses the enums too, and
# takes 4 us more.
_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)


class WatchedSocket:
    """Read from when it is made until `close`, on the loop's thread.

    `on_message` gets the route ("" where the socket has none) and the parts; `on_empty` hears that all that
    had arrived is read.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        turns: Turns,
        on_message: Callable[[bytes, list[zmq.Frame]], None],
        *,
        has_routes: bool = False,
        on_empty: Callable[[], None] | None = None,
    ) -> None:
        self.socket = socket
        self._turns = turns
        self.on_message = on_message
        self._has_routes = has_routes
        self._on_empty = on_empty
        self._is_skipping = False  # the rest of a message of too many parts is being read
        self._is_due = False  # its turn runs, or waits
        asyncio.get_running_loop().add_reader(int_option(socket, zmq.FD), self._read_ready)
        self.schedule_read()

    def close(self, linger_ms: int = 0) -> None:
        """Read no more; what is queued has this time to be sent."""
        asyncio.get_running_loop().remove_reader(int_option(self.socket, zmq.FD))
        self.socket.close(linger=linger_ms)

    def schedule_read(self) -> None:
        """Have a turn soon, once: each reply of a turn of the loop calls this.

        Does nothing while its turn runs, which reads until nothing is left, or has another.
        """
        if not self._is_due:
            self._is_due = True
            self._turns.enqueue(PEERS, self._turn)

    def _read_ready(self) -> None:
        """Have a turn now. ZMQ's descriptor signals only once, so turns follow until nothing is left."""
        if not self._is_due:
            self._is_due = True
            self._turns.run_now(PEERS, self._turn)

    def _turn(self) -> bool:
        is_more = False
        try:
            is_more = self._read_turn()
        finally:
            self._is_due = is_more
        return is_more

    def _read_turn(self) -> bool:
        """Read the messages of one turn. Return whether more may be left.

        libzmq returns one message of each connection in turn.
        """
        for _ in range(MESSAGES_PER_TURN):
            if self.socket.closed:
                return False
            if not int_option(self.socket, _EVENTS) & _POLLIN:
                if self._on_empty is not None:
                    self._on_empty()
                return False
            if self._is_skipping:
                self._is_skipping = self._skip_parts()
                return True
            try:
                route, parts = self._receive()
            except zmq.Again:
                return False
            self._is_skipping = parts[-1].more
            try:
                self.on_message(route, parts)
            except Exception:  # one sender's message must not stop the reading of others'
                log.exception("peer message failed", limit_by="peer socket")
            if self._turns.is_over():
                break
        return True

    def _receive(self) -> tuple[bytes, list[zmq.Frame]]:
        """Return one message: its route, and its other parts, of which there may be more than `MAX_PARTS`.

        Raises zmq.Again where there is none.
        """
        route = self.socket.recv(_NOBLOCK) if self._has_routes else b""
        part = self.socket.recv(_NOBLOCK, copy=False)
        parts = [part]
        while part.more and len(parts) < MAX_PARTS:
            part = self.socket.recv(_NOBLOCK, copy=False)
            parts.append(part)
        return route, parts

    def _skip_parts(self) -> bool:
        """Read and drop some parts of a message. Return whether more are left: libzmq has all of them."""
        return all(self.socket.recv(_NOBLOCK, copy=False).more for _ in range(PARTS_PER_TURN))


def int_option(of: zmq.Socket[bytes], option: int) -> int:
    """Return an option of the socket that is a number."""
    value = of.getsockopt(option)
    assert isinstance(value, int)
    return value
