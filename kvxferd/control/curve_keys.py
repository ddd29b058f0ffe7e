"""The daemon's CURVE key: created once by `kvxferd keygen`, in a file that only its owner may read."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from kvxferd.config import ANY_KEY, PeerConfig, split_endpoint
from kvxferd.core.allowlist import PeerAllowlist
from kvxferd.errors import ConfigError
from kvxferd.ids import Endpoint
from kvxferd.wire.endpoint import host_of

SECRET_MODE = 0o600
_DIGITS = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class CurveKeyPair:
    """A Curve25519 key pair. The public half goes into other daemons' `peer.curve_allowed_keys`."""

    public: str  # 64 hex digits
    secret: bytes = field(repr=False)  # 32 bytes


def make_key(path: Path) -> CurveKeyPair:
    """Write a new secret key to the file and return the pair. Raises ConfigError if the file exists."""
    _check_curve_support()
    _, text = zmq.curve_keypair()
    secret = z85.decode(text)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, SECRET_MODE)
    except FileExistsError:
        raise ConfigError(
            f"cannot write a key to {path}: a file is there; daemons that allow its public key would "
            "refuse this one with another. Choose another file, or remove that one"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot write a key to {path}: {error.strerror}; give --output a file in a directory that is "
            "there and where this user may write"
        ) from error
    with os.fdopen(fd, "w") as file:
        os.fchmod(fd, SECRET_MODE)  # whatever the umask
        file.write(secret.hex() + "\n")
    return CurveKeyPair(_public_of(secret), secret)


def read_key(path: Path) -> CurveKeyPair:
    """Return the key pair of a file that `make_key` wrote. Raises ConfigError, also if others may read it."""
    _check_curve_support()
    what = f"cannot use peer.curve_secret_key_file = {str(path)!r}"
    try:
        # O_NONBLOCK, so that opening a FIFO does not wait for a writer.
        with open(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            text = file.read(4096) if stat.S_ISREG(status.st_mode) else ""
    except PermissionError as error:
        raise ConfigError(
            f"{what}: uid {os.geteuid()} may not read it; make it the daemon's user's: "
            f"chown {os.geteuid()} {path} && chmod 600 {path}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no key file"
        raise ConfigError(f"{what}: {why}; `kvxferd keygen --output {path}` makes one") from error
    if status.st_mode & 0o077:
        raise ConfigError(
            f"{what}: its mode is {stat.S_IMODE(status.st_mode):#o}, others may read it; chmod 600 {path}"
        )
    if not _DIGITS.fullmatch(text.strip()):
        raise ConfigError(f"{what}: it holds no key of 64 hex digits; `kvxferd keygen` writes such a file")
    secret = bytes.fromhex(text.strip())
    return CurveKeyPair(_public_of(secret), secret)


def allowlist_of(
    config: PeerConfig, key: CurveKeyPair | None, file_keys: frozenset[str] = frozenset()
) -> PeerAllowlist:
    """Return the allow-lists of the configuration and of its keys file.

    They always include this node's own numeric address.
    """
    networks = [ipaddress.ip_network(text) for text in config.allowed_addresses]
    own = host_of(Endpoint(config.advertise or config.bind))
    with suppress(ValueError):
        if networks and not ipaddress.ip_address(own).is_unspecified:
            networks.append(ipaddress.ip_network(own))  # engines of one node read each other too
    keys = frozenset(text.lower() for text in config.curve_allowed_keys) | file_keys
    return PeerAllowlist(
        own_key=key.public if key else "",
        allowed_keys=None if ANY_KEY in keys else keys,
        networks=tuple(networks),
    )


def exposure_of(config: PeerConfig) -> str:
    """Return why any host that reaches the peer socket may act as a peer; "": none may."""
    host, _ = split_endpoint(config.bind)
    with suppress(ValueError):
        if host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback:
            return ""
    if not config.curve_secret_key_file:
        return (
            f"peer.bind = {config.bind!r} is open to its network without keys: whoever reaches it may speak "
            "as a peer; set peer.curve_secret_key_file and peer.curve_allowed_keys"
        )
    if ANY_KEY in config.curve_allowed_keys:
        return (
            'peer.curve_allowed_keys = ["any"]: whoever reaches the peer socket may speak as a peer; '
            "list the keys of the other daemons"
        )
    return ""


def _public_of(secret: bytes) -> str:
    return z85.decode(zmq.curve_public(z85.encode(secret))).hex()


def _check_curve_support() -> None:
    if not zmq.has("curve"):
        raise ConfigError(
            "cannot use CURVE keys: this libzmq was built without it; install pyzmq's own wheel"
        )
