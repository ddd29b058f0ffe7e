"""A peer that fills a daemon's inbound queue and is gone before the loop has taken it."""

from __future__ import annotations

import pytest

from tests.support.python_process import run_python

# In a process of its own: what this is about ends the process.
SCRIPT = """
import asyncio
import socket
import time

from tests.support.peer_socket_harness import HELLO, NoChecks
from kvxferd.control.peer_socket import RECEIVE_HIGH_WATER, PeerSocket
from kvxferd.wire.codec import encode


GREETING = b"\\xff" + bytes(8) + b"\\x7f\\x03\\x00" + b"NULL".ljust(20, b"\\0") + bytes(32)
PROPERTIES = b"\\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER" + b"\\x08Identity" + bytes(4)
READY = b"\\x05READY" + PROPERTIES
QUESTION = encode(HELLO)


async def main():
    heard = []
    peers = PeerSocket("tcp://127.0.0.1:0", heard.append, NoChecks)
    peers.start()
    port = int(peers.bound_endpoint.rpartition(":")[2])
    made = await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port))
    made.sendall(GREETING + b"\\x04" + bytes([len(READY)]) + READY)
    made.setblocking(False)
    answered = b""
    while b"READY" not in answered:  # who connects may send once the handshake is over
        answered += await asyncio.get_running_loop().sock_recv(made, 4096)
    made.setblocking(True)
    frame = b"\\x00" + bytes([len(QUESTION)]) + QUESTION
    made.sendall(frame * 40 * RECEIVE_HIGH_WATER)
    while not heard:
        await asyncio.sleep(0)
    made.sendall(frame * 1000 * RECEIVE_HIGH_WATER)  # more than the queue takes
    made.close()
    time.sleep(2.5)  # the loop is late, by more than any heartbeat
    peers.stop()
    print("lives")


asyncio.run(main())
"""


@pytest.mark.slow
def test_it_costs_the_daemon_nothing():
    done = run_python("-c", SCRIPT)
    assert (done.returncode, done.stdout.strip()) == (0, "lives"), done.stderr[-1000:]


# --- A peer socket that is stopped while more connections came and went than anybody has looked at


# In a process of its own: what it is about would hold this one's interpreter for ever.
PROGRAM = """
import asyncio, socket, threading
from kvxferd.control.connection_guard import ConnectionGuard
from kvxferd.control.peer_socket import PeerSocket
from tests.support.peer_socket_harness import NoChecks


going_on = threading.Event()
take = ConnectionGuard._handle_monitor_event

def slow(self):
    going_on.wait()
    return take(self)

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
    peers = PeerSocket("tcp://127.0.0.1:0", lambda event: None, NoChecks)
    peers.start()
    await asyncio.to_thread(fill, int(peers.bound_endpoint.rpartition(":")[2]))
    going_on.set()
    peers.stop_listening()
    peers.stop()

asyncio.run(main())
print("stopped")
"""


@pytest.mark.process
def test_a_full_queue_of_the_monitor_does_not_keep_the_socket_from_stopping():
    ended = run_python("-c", PROGRAM)
    assert (ended.returncode, ended.stdout.splitlines()[-1:]) == (0, ["stopped"]), ended.stderr
