"""HTTP, over TCP and over control.sock."""

from __future__ import annotations

import contextlib
import socket
import time

from tests.proofs.hostile.attacker import Scene
from tests.proofs.hostile.attacks.floods import newcomer
from tests.proofs.hostile.raw_protocol import connected
from tests.proofs.hostile.registry import Setup, attack

SMALL = Setup(num_fds=300)
HEAD = b"GET /v1/status HTTP/1.1\r\nHost: x\r\n"


def tcp(scene: Scene) -> socket.socket:
    made = socket.create_connection(scene.a.http, timeout=2.0)
    made.settimeout(2.0)
    return made


@attack("user", setup=SMALL)
def unfinished_headers_on_control(scene: Scene) -> str:
    """Hundreds of requests whose headers never end, from a user whom control.sock's group lets in."""
    made = []
    for _ in range(400):
        with contextlib.suppress(OSError):
            one = connected(scene.a.control_socket)
            one.sendall(HEAD)
            made.append(one)
    scene.rest(0.5)
    return newcomer(scene, "late-control")


@attack("stranger", setup=SMALL)
def idle_after_an_answer(scene: Scene) -> str:
    """Connections that got an answer and are kept open; the daemon may have 300 descriptors."""
    made = []
    for _ in range(300):
        with contextlib.suppress(OSError):
            one = tcp(scene)
            one.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            one.recv(4096)
            made.append(one)
    return newcomer(scene, "late-idle")


@attack("stranger", fresh=True)
def answers_that_are_not_read(scene: Scene) -> str:
    """Requests by the thousand on each connection, for the longest answers, none of which is read."""
    request = b"GET /v1/history HTTP/1.1\r\nHost: x\r\n\r\n"
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
        b"POST /v1/drain HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n" + b"c" * 20_000_000,
        b"POST /v1/drain HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"1\r\nd\r\n" * 2_000_000,
        b"POST /v1/drain HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\nTransfer-Encoding: chunked\r\n\r\n",
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
        b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path
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


@attack("stranger")
def levers_over_tcp(scene: Scene) -> str:
    """What changes something is asked for over TCP, with every disguise of a request."""
    return _pull_levers(lambda: tcp(scene))


@attack("user")
def levers_on_control(scene: Scene) -> str:
    """What changes something is asked for on control.sock by a user who may only look."""
    return _pull_levers(lambda: connected(scene.a.control_socket))


def _pull_levers(connect: object) -> str:
    for path in (
        b"/v1/drain",
        b"/v1/peers/drop?endpoint=x",
        b"/v1/transfers/cancel?transfer_id=t1",
        b"/v1/reload",
        b"//v1/drain",
        b"/v1/%64rain",
        b"/healthz/../v1/drain",
    ):
        for method in (b"POST", b"PUT", b"GET"):
            with contextlib.suppress(OSError):
                one = connect()  # type: ignore[operator]
                one.sendall(
                    b"%s %s HTTP/1.1\r\nHost: x\r\nX-HTTP-Method-Override: POST\r\nContent-Length: 0\r\n\r\n"
                    % (method, path)
                )
                status = one.recv(4096).split(b" ")[1]
                one.close()
                if status in (b"200", b"202"):
                    return f"{method.decode()} {path.decode()} answers {status.decode()}"
    return ""
