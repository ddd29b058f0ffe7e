"""Shutting the connections that were accepted at one port, and counting those of others."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from kvxferd.control.connection_shutdown import shut_accepted_connections

pytestmark = pytest.mark.process

_CONNECT = """
import socket, sys

made = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("connected", flush=True)
print(made.recv(1))
"""


def test_connections_of_others_are_shut_and_counted_once_and_ones_own_is_not_counted() -> None:
    with ExitStack() as closing:
        listener = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
        other_listener = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listener.getsockname()[1]
        other = subprocess.Popen(
            [sys.executable, "-c", _CONNECT, str(port)], stdout=subprocess.PIPE, text=True
        )
        closing.callback(other.wait, 30)
        closing.callback(other.kill)
        assert other.stdout is not None
        assert other.stdout.readline() == "connected\n"
        theirs = closing.enter_context(listener.accept()[0])
        closing.enter_context(theirs.dup())
        own = closing.enter_context(socket.create_connection(("127.0.0.1", port)))
        closing.enter_context(listener.accept()[0])
        elsewhere = closing.enter_context(socket.create_connection(other_listener.getsockname()))
        left_alone = closing.enter_context(other_listener.accept()[0])
        assert shut_accepted_connections(port) == 1
        assert other.communicate(timeout=30)[0] == "b''\n"
        assert own.recv(1) == b""
        left_alone.sendall(b"x")
        assert elsewhere.recv(1) == b"x"
