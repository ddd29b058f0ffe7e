"""HTTP, over TCP and over control.sock."""

from __future__ import annotations

import contextlib
import socket
import time

from tests.proofs.hostile.attack import Scene, attack

HEAD = b"GET /v1/status HTTP/1.1\r\nHost: [::1]\r\n"


def tcp(scene: Scene) -> socket.socket:
    made = socket.create_connection(scene.a.http_address, timeout=2.0)
    made.settimeout(2.0)
    return made


@attack("stranger", fresh=True)
def answers_that_are_not_read(scene: Scene) -> str:
    """Requests by the thousand on each connection, for the longest answers, none of which is read."""
    request = b"GET /v1/history HTTP/1.1\r\nHost: [::1]\r\n\r\n"
    made = [tcp(scene) for _ in range(16)]
    for one in made:
        one.setblocking(False)
    until = time.monotonic() + 5.0
    while time.monotonic() < until:
        for one in list(made):
            try:
                one.send(request * 1000)
            except BlockingIOError:
                continue
            except OSError:
                made.remove(one)
        time.sleep(0.005)
    return ""


@attack("stranger", fresh=True)
def long_requests(scene: Scene) -> str:
    """Targets, headers and bodies of megabytes, in one piece and in chunks."""
    heads = [
        b"GET /" + b"a" * 8_000_000 + b" HTTP/1.1\r\n\r\n",
        HEAD + b"X: " + b"b" * 8_000_000 + b"\r\n\r\n",
        HEAD + b"".join(b"X-%d: y\r\n" % n for n in range(200_000)) + b"\r\n",
        b"POST /v1/drain HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 100000000\r\n\r\n" + b"c" * 20_000_000,
        b"POST /v1/drain HTTP/1.1\r\nHost: [::1]\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"1\r\nd\r\n" * 2_000_000,
        b"POST /v1/drain HTTP/1.1\r\nHost: [::1]\r\nContent-Length: -1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"\x00" * 1_000_000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" * 1000,
        HEAD + b"Expect: 100-continue\r\nContent-Length: 50000000\r\n\r\n",
    ]
    for head in heads:
        with contextlib.suppress(OSError):
            one = tcp(scene)
            one.sendall(head)
            one.recv(4096)
            one.close()
    return ""


@attack("stranger")
def a_flood_of_requests(scene: Scene) -> str:
    """The longest answers asked for as fast as they are read, by eight connections, for some seconds."""
    request = b"".join(
        b"GET %s HTTP/1.1\r\nHost: [::1]\r\n\r\n" % path
        for path in (b"/v1/samples", b"/metrics", b"/v1/status", b"/v1/history")
    )
    made = [tcp(scene) for _ in range(8)]
    until = time.monotonic() + 4.0
    while time.monotonic() < until:
        for one in made:
            with contextlib.suppress(OSError):
                one.sendall(request)
        for one in made:
            with contextlib.suppress(OSError):
                one.recv(1 << 20)
    return ""
