"""A peer socket that is stopped while more connections came and went than anybody has looked at."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

# In a process of its own: what it is about would hold this one's interpreter for ever.
PROGRAM = """
import asyncio, socket, threading
from kvxferd.control.connection_guard import ConnectionGuard
from kvxferd.control.peer_socket import PeerSocket


going_on = threading.Event()
take = ConnectionGuard._handle_monitor_event

def slow(self, event, fd):
    going_on.wait()
    take(self, event, fd)

ConnectionGuard._handle_monitor_event = slow

def fill(port):
    # libzmq greets each connection, until its I/O thread waits for room in the monitor's queue.
    for _ in range(4000):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.settimeout(2)
            try:
                stranger.recv(1)
            except TimeoutError:
                return
    raise AssertionError("the queue takes everything")

async def main():
    peers = PeerSocket("tcp://127.0.0.1:0", lambda event: None)
    peers.start()
    await asyncio.to_thread(fill, int(peers.bound_endpoint.rpartition(":")[2]))
    going_on.set()
    peers.stop_listening()
    peers.stop()

asyncio.run(main())
print("stopped")
"""


def test_a_full_queue_of_the_monitor_does_not_keep_the_socket_from_stopping():
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout.splitlines()[-1:]) == (0, ["stopped"]), ended.stderr
