"""What libzmq reports of the connections that this node makes: made, refused, lost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import zmq

from kvxferd.control.turns import Turns
from kvxferd.control.watched_socket import WatchedSocket

# CONNECT_RETRIED: the connection was refused, or lost at once.
_ENDED = {
    int(zmq.EVENT_CONNECT_RETRIED): "it accepts no connection there",
    int(zmq.EVENT_DISCONNECTED): "it has closed the connection",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "it does not admit this node",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "it does not speak as a daemon does, or has another key",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "it ended the handshake: it has another key, or is no daemon",
}
# Then libzmq makes no other connection for that socket.
_FINAL = (int(zmq.EVENT_HANDSHAKE_FAILED_AUTH), int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL))
_CONNECTED, _MONITOR_STOPPED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED), int(zmq.EVENT_MONITOR_STOPPED)
STOP_MS = 2_000  # for libzmq to close all connections


class ConnectionReport(NamedTuple):
    """A connection was made, or has ended."""

    ended: str  # why; "": it was made
    is_final: bool  # libzmq does not try again


class ConnectionReports:
    """One monitor for each socket that is followed, until libzmq has closed that socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], turns: Turns) -> None:
        self._context = context
        self._turns = turns
        self._monitors: dict[zmq.Socket[bytes], WatchedSocket] = {}
        self._num_followed = 0

    def follow(self, dealer: zmq.Socket[bytes], on_report: Callable[[ConnectionReport], None]) -> None:
        """Have libzmq report how the dealer's connection comes and goes. Raises ZMQError.

        The socket that reads is there first: libzmq waits for one, and where no descriptor is left there
        would be none.
        """
        monitor: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        try:
            self._num_followed += 1
            address = f"inproc://connection-{self._num_followed}"
            monitor.connect(address)
            dealer.monitor(address, sum(_ENDED) | _CONNECTED | _MONITOR_STOPPED)
        except zmq.ZMQError:
            monitor.close(linger=0)
            raise
        self._monitors[monitor] = WatchedSocket(
            monitor, self._turns, partial(self._on_event, monitor, on_report)
        )

    def read_rest(self) -> None:
        """Read until libzmq has closed each socket that was followed: it waits where nobody reads."""
        poller = zmq.Poller()
        for monitor in self._monitors:
            poller.register(monitor, zmq.POLLIN)
        while self._monitors and (ready := poller.poll(STOP_MS)):
            for monitor, _ in ready:
                if _event_of(monitor.recv_multipart(copy=False)) == _MONITOR_STOPPED:
                    poller.unregister(monitor)
                    self._monitors.pop(monitor).close()

    def _on_event(
        self,
        monitor: zmq.Socket[bytes],
        on_report: Callable[[ConnectionReport], None],
        _: bytes,
        parts: list[zmq.Frame],
    ) -> None:
        if (event := _event_of(parts)) == _MONITOR_STOPPED:
            self._monitors.pop(monitor).close()
        else:
            on_report(ConnectionReport("" if event == _CONNECTED else _ENDED[event], event in _FINAL))


def _event_of(parts: list[zmq.Frame]) -> int:
    """Return which event a monitor's message reports."""
    return int.from_bytes(parts[0].bytes[:2], sys.byteorder)
