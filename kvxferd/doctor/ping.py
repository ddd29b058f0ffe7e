"""Finds out whether another node's daemon can be reached, and if not, why: `kvxferd ping`.

It makes a connection of its own, with this node's key, and greets the daemon there; so it works while the
local daemon is down, and the other daemon may be of an earlier release. The other side of a failed handshake
gives hardly a reason, so each step is tried by itself: name, TCP, ZMTP greeting, handshake, `PeerHello`.
"""

from __future__ import annotations

import os
import secrets
import socket
import statistics
import time
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

import kvxferd
from kvxferd.config import PeerConfig
from kvxferd.control.allowed_keys_file import read_allowed_keys
from kvxferd.control.connection_guard import tcp_byte_counts
from kvxferd.control.curve_keys import CurveKeyPair, allowlist_of, read_key
from kvxferd.control.zap import REFUSED_ADDRESS, REFUSED_KEY
from kvxferd.core.allowlist import PeerAllowlist
from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import BootId, Endpoint
from kvxferd.telemetry.units import format_time
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.output import print_line
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.common import Versions
from kvxferd.wire.endpoint import address_of, host_of, key_of, parse_endpoint
from kvxferd.wire.peer import PEER_VERSIONS, PeerHello, PeerRefused, PeerWelcome

GREETING_BYTES = 64
# Signature and version of ZMTP 3.0. libzmq then sends its whole greeting, the mechanism in bytes 12 to 31.
# The rest is not sent: libzmq closes at once where the mechanism is not its own.
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00"
MAX_REPLY_BYTES = 64 << 10  # of a welcome or a refusal, of a daemon that is not trusted yet
# libzmq bounds a part, and not how many parts a message has: it keeps all of them until the last.
MAX_RECEIVED_BYTES = 4 * MAX_REPLY_BYTES
CHECK_S = 0.02  # 20 MB arrive meanwhile at 1 GB/s
MAX_MESSAGE_CHARS = 500  # of a refusal's text, which its sender chose


class Outcome(StrEnum):
    """What was found. The values are stable."""

    OK = "ok"
    NOT_ALLOWED_HERE = "not-allowed-here"
    NAME_UNKNOWN = "name-unknown"
    NOTHING_LISTENS = "nothing-listens"
    UNREACHABLE = "unreachable"
    NOT_A_DAEMON = "not-a-daemon"
    NEEDS_KEY = "needs-key"
    HAS_NO_KEY = "has-no-key"
    WRONG_SERVER_KEY = "wrong-server-key"
    KEY_REFUSED = "key-refused"
    ADDRESS_REFUSED = "address-refused"
    NO_REPLY = "no-reply"
    BAD_VERSION = "bad-version"


# What each failure means, and what to do.
FAILURES: dict[Outcome, tuple[str, str]] = {
    Outcome.NOT_ALLOWED_HERE: (
        "this node's own settings do not allow it",
        "mend this node's peer settings",
    ),
    Outcome.NAME_UNKNOWN: (
        "its host name is not resolved here",
        "give a numeric address, or mend this node's resolver",
    ),
    Outcome.NOTHING_LISTENS: (
        "nothing listens on that port",
        "start the daemon there, or give the port that `kvxferd status` shows there",
    ),
    Outcome.UNREACHABLE: (
        "the host cannot be reached",
        "look for a firewall and for routes between the nodes (`ip route get`), and whether the node is up",
    ),
    Outcome.NOT_A_DAEMON: (
        "what listens there is no daemon's peer socket",
        "give peer.bind's port, not that of http.bind: `kvxferd status` there shows the endpoint",
    ),
    Outcome.NEEDS_KEY: (
        "the daemon there speaks CURVE alone, and this node has no key",
        "make one with `kvxferd keygen`, set peer.curve_secret_key_file here, list its public key there, and "
        "give ENDPOINT#KEY as that daemon's `kvxferd status` shows it; where this node has a key, name the "
        "file that sets it with --config",
    ),
    Outcome.HAS_NO_KEY: (
        "the daemon there has no key, and this one speaks CURVE alone",
        "set peer.curve_secret_key_file there",
    ),
    Outcome.WRONG_SERVER_KEY: (
        "the daemon there has another key than the endpoint names",
        "give the endpoint as that daemon's `kvxferd status` shows it; if it should have this key, another "
        "daemon has taken its address",
    ),
    Outcome.KEY_REFUSED: (
        "the daemon there does not admit this node's key",
        "add this node's public key (`kvxferd keygen --public FILE`) to peer.curve_allowed_keys or its file "
        "there; a daemon of an earlier release says the same where it refuses the address",
    ),
    Outcome.ADDRESS_REFUSED: (
        "the daemon there does not admit this node's address",
        "add the address from which this node connects to peer.allowed_addresses there: its log has it in a "
        "line `peer turned away`",
    ),
    Outcome.NO_REPLY: (
        "a daemon is there and does not answer",
        "look at it on its node: `kvxferd status` and its log; if that does not answer either, it hangs: "
        "take `kvxferd support-bundle` there, then restart it",
    ),
    Outcome.BAD_VERSION: (
        "the two speak no version of the peer protocol in common",
        "upgrade the older of the two",
    ),
}


class Ping(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one ping."""

    endpoint: str
    outcome: Outcome
    message: str  # what was found
    remedy: str = ""
    boot: str = ""  # of the daemon there
    version: int = 0  # of the protocol, which both speak; 0: none
    versions_here: Versions = PEER_VERSIONS
    versions_there: Versions | None = None  # None: it did not reply
    software_there: str = ""
    connect_s: float = 0.0  # until the first reply: TCP, handshake, greeting
    round_trips_s: list[float] = []

    @property
    def median_s(self) -> float:
        """Return the median round trip; 0.0 without one."""
        return statistics.median(self.round_trips_s) if self.round_trips_s else 0.0


class _Failed(Exception):
    """A failure, in detail where there is more to say than `FAILURES` does."""

    def __init__(self, outcome: Outcome, detail: str = "", remedy: str = "") -> None:
        meaning, usual_remedy = FAILURES[outcome]
        super().__init__(outcome)
        self.outcome = outcome
        self.message = f"{meaning}: {detail}" if detail else meaning
        self.remedy = remedy or usual_remedy


def find_endpoint(name: str, daemon: ControlClient) -> Endpoint:
    """Return the endpoint that a name means: an endpoint, or a peer's address or engine's id that the local
    daemon knows, whose key then is known too.

    Raises KvxferdError where it is neither.
    """
    if "#" not in name:
        with suppress(KvxferdError):  # the local daemon may be down
            for peer in daemon.get("/v1/peers")["peers"]:
                address = address_of(Endpoint(peer["endpoint"]))
                engines = (engine["engine_id"] for engine in peer["engines"])
                if name in (address, address.removeprefix("tcp://"), *engines):
                    return Endpoint(peer["endpoint"])
    if ":" not in name:
        text = f"cannot find {name!r}: this node's daemon knows no such engine or peer; see `kvxferd peers`"
        raise KvxferdError(f"{text}, or give tcp://HOST:PORT", Code.ENDPOINT_INVALID)
    return parse_endpoint(name if "://" in name else f"tcp://{name}")


def read_identity(config: PeerConfig) -> tuple[PeerAllowlist, CurveKeyPair | None]:
    """Return this node's allow-lists and key. Raises KvxferdError where their files cannot be read."""
    secret, listed = config.curve_secret_key_file, config.curve_allowed_keys_file
    key = read_key(Path(secret)) if secret else None
    keys = read_allowed_keys(Path(listed), secret) if listed else frozenset[str]()
    return allowlist_of(config, key, keys), key


def ping(
    endpoint: Endpoint,
    allowlist: PeerAllowlist,
    key: CurveKeyPair | None,
    *,
    count: int = 3,
    timeout_s: float = 5.0,
) -> Ping:
    """Return what is at the endpoint, after `count` round trips. Each step has `timeout_s`."""
    try:
        _check_settings(endpoint, allowlist)
        _check_mechanism(endpoint, _mechanism_there(endpoint, timeout_s))
        return _send_hello(endpoint, key, count, timeout_s)
    except _Failed as failed:
        return Ping(endpoint=endpoint, outcome=failed.outcome, message=failed.message, remedy=failed.remedy)


def _check_settings(endpoint: Endpoint, allowlist: PeerAllowlist) -> None:
    try:
        allowlist.check(endpoint)
    except KvxferdError as error:
        why, _, remedy = error.message.removeprefix(f"cannot reach {address_of(endpoint)}: ").partition("; ")
        raise _Failed(Outcome.NOT_ALLOWED_HERE, why, remedy) from None


def _check_mechanism(endpoint: Endpoint, mechanism: str) -> None:
    if mechanism == "CURVE" and not key_of(endpoint):
        raise _Failed(Outcome.NEEDS_KEY)
    if mechanism != "CURVE" and key_of(endpoint):
        raise _Failed(Outcome.HAS_NO_KEY)


# --- TCP and ZMTP


def _mechanism_there(endpoint: Endpoint, timeout_s: float) -> str:
    """Return the security mechanism of the ZMTP greeting there. Raises _Failed."""
    place = host_of(endpoint), int(address_of(endpoint).rpartition(":")[2])
    try:
        with socket.create_connection(place, timeout_s) as connection:
            text = _exchange_greetings(connection, timeout_s)
    except (socket.gaierror, UnicodeError) as error:  # a label of no letters, or of more than 63
        raise _Failed(Outcome.NAME_UNKNOWN, getattr(error, "strerror", None) or str(error)) from None
    except ConnectionRefusedError:
        raise _Failed(Outcome.NOTHING_LISTENS) from None
    except OSError as error:
        why = "no answer to TCP" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise _Failed(Outcome.UNREACHABLE, why) from None
    if len(text) < GREETING_BYTES or text[0] != 0xFF or text[9] != 0x7F:
        raise _Failed(Outcome.NOT_A_DAEMON)
    return text[12:32].rstrip(b"\0").decode("ascii", "replace")


def _exchange_greetings(connection: socket.socket, timeout_s: float) -> bytes:
    """Return the greeting of the other side, shorter where it closes or does not speak ZMTP."""
    deadline = time.monotonic() + timeout_s
    text = b""
    try:
        connection.sendall(_GREETING)
        while len(text) < GREETING_BYTES:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            part = connection.recv(GREETING_BYTES - len(text))
            if not part:
                break
            text += part
            if text[0] != 0xFF:
                break
    except TimeoutError:
        if not text:
            raise _Failed(Outcome.NO_REPLY, "TCP connects, and then nothing comes") from None
    except OSError:
        pass  # a reset: what came so far decides
    return text


# --- the handshake and the greeting


def _send_hello(endpoint: Endpoint, key: CurveKeyPair | None, count: int, timeout_s: float) -> Ping:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    monitor = dealer.get_monitor_socket()
    try:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
        dealer.setsockopt(zmq.IPV6, "[" in endpoint)
        if key is not None and key_of(endpoint):
            dealer.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(bytes.fromhex(key_of(endpoint))))
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(bytes.fromhex(key.public)))
            dealer.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(key.secret))
        began = time.monotonic()
        dealer.connect(address_of(endpoint))
        fd = _await_handshake(monitor, bool(key_of(endpoint)), timeout_s)
        boot = BootId(f"ping-{secrets.token_hex(4)}")
        welcome, _ = _round_trip(dealer, fd, 1, boot, timeout_s)
        connect_s = time.monotonic() - began
        round_trips = [_round_trip(dealer, fd, number, boot, timeout_s)[1] for number in range(2, count + 2)]
        return Ping(
            endpoint=endpoint,
            outcome=Outcome.OK,
            message=f"it answers, and both speak version {welcome.version}",
            boot=welcome.boot,
            version=welcome.version,
            versions_there=welcome.versions,
            software_there=welcome.software,
            connect_s=connect_s,
            round_trips_s=round_trips,
        )
    finally:
        dealer.close(linger=0)
        # The monitor's socket ends with the dealer: `disable_monitor` may wait for this thread.
        with suppress(zmq.ZMQError):
            while monitor.poll(500):
                if parse_monitor_message(monitor.recv_multipart())["event"] == zmq.EVENT_MONITOR_STOPPED:
                    break
        monitor.close(linger=0)
        context.term()


def _await_handshake(monitor: zmq.Socket[bytes], has_key: bool, timeout_s: float) -> int:
    """Return libzmq's descriptor of the connection, after its handshake. Raises _Failed."""
    deadline, fd = time.monotonic() + timeout_s, -1
    while (left_s := deadline - time.monotonic()) > 0:
        if not monitor.poll(max(1, int(left_s * 1000))):
            break
        found = parse_monitor_message(monitor.recv_multipart())
        match int(found["event"]):
            case zmq.EVENT_CONNECTED:
                fd = int(found["value"])
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return fd
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise _refused(str(int(found["value"])).encode(), has_key)
            case (
                zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
                | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
                | zmq.EVENT_DISCONNECTED
                | zmq.EVENT_CLOSED
            ):
                if has_key:
                    raise _Failed(Outcome.WRONG_SERVER_KEY)
                raise _Failed(Outcome.NO_REPLY, "it closes the connection during the handshake")
    raise _Failed(Outcome.NO_REPLY, "its handshake does not end, so its event loop is stuck or overloaded")


def _refused(status: bytes, has_key: bool) -> _Failed:
    if status == REFUSED_KEY and has_key:
        return _Failed(Outcome.KEY_REFUSED)
    if status not in (REFUSED_KEY, REFUSED_ADDRESS, b"300"):
        return _Failed(
            Outcome.NOT_A_DAEMON,
            f"it refuses the handshake with status {status.decode()}, as no kvxferd does",
        )
    return _Failed(Outcome.ADDRESS_REFUSED)


def _round_trip(
    dealer: zmq.Socket[bytes], fd: int, number: int, boot: BootId, timeout_s: float
) -> tuple[PeerWelcome, float]:
    hello = PeerHello(request=number, versions=PEER_VERSIONS, boot=boot, endpoint=Endpoint(""))
    num_before = _received_bytes(fd)
    began = time.perf_counter()
    dealer.send(encode(hello))
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        if not dealer.poll(max(1, int(min(left_s, CHECK_S) * 1000))):
            if _received_bytes(fd) - num_before > MAX_RECEIVED_BYTES:
                raise _Failed(
                    Outcome.NO_REPLY, f"it sends more than {MAX_RECEIVED_BYTES} bytes, which are no reply"
                )
            continue
        try:
            reply = PEER_MESSAGES.decode(dealer.recv())
        except KvxferdError as error:
            raise _bad_version(f"its reply is of no version that is known here: {error.message}") from None
        if getattr(reply, "request", 0) not in (0, number):
            continue
        took_s = time.perf_counter() - began
        match reply:
            case PeerWelcome():
                if not PEER_VERSIONS.oldest <= reply.version <= PEER_VERSIONS.newest:
                    raise _bad_version(f"it chose version {reply.version}")
                return reply, took_s
            case PeerRefused() if reply.code is Code.BAD_VERSION:
                raise _bad_version(reply.message[:MAX_MESSAGE_CHARS])
            case PeerRefused():
                message = reply.message[:MAX_MESSAGE_CHARS]
                detail = f"it refuses the greeting: {message} [{reply.code.value}]"
                raise _Failed(Outcome.NO_REPLY, detail)
    raise _Failed(Outcome.NO_REPLY, f"no reply to the greeting within {timeout_s:g} s")


def _received_bytes(fd: int) -> int:
    """Return how many bytes have come over libzmq's connection; 0 where it is closed."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            return tcp_byte_counts(connection)[1]
    except OSError:
        return 0


def _bad_version(why: str) -> _Failed:
    return _Failed(Outcome.BAD_VERSION, f"{why} (this one speaks {PEER_VERSIONS})")


def print_ping(result: Ping) -> None:
    """Print the result, a fact a line."""
    print_line(f"{result.endpoint}: {result.message} [{result.outcome.value}]")
    if result.remedy:
        print_line(f"  to do: {result.remedy}")
    if result.outcome is not Outcome.OK:
        return
    software = f", kvxferd {result.software_there}" if result.software_there else ""
    print_line(f"  there: boot {result.boot}, protocol version {result.versions_there}{software}")
    print_line(f"  here:  protocol version {result.versions_here}, kvxferd {kvxferd.__version__}")
    fastest, slowest = min(result.round_trips_s), max(result.round_trips_s)
    print_line(
        f"  round trips: {len(result.round_trips_s)}, median {format_time(result.median_s)} "
        f"({format_time(fastest)} to {format_time(slowest)}); connecting took {format_time(result.connect_s)}"
    )
