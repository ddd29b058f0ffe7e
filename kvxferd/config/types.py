"""The types of settings' values, each with the form of a valid one."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec

_PORT = r"(6553[0-5]|655[0-2]\d|65[0-4]\d\d|6[0-4]\d{3}|[1-5]\d{4}|\d{1,4})"
_HOST_PORT = rf"(\[[0-9a-fA-F:.%]+\]|[^\s\[\]:/]+):{_PORT}"

# `title` is the form of a valid value, shown in errors and in `serve --help`.
Seconds = Annotated[float, msgspec.Meta(ge=0.01, le=86_400, title="seconds, 0.01 to 86400")]
SecondsOrZero = Annotated[float, msgspec.Meta(ge=0, le=86_400, title="seconds, 0 to 86400")]
Directory = Annotated[str, msgspec.Meta(pattern="^/", title="an absolute path")]
SocketPath = Annotated[str, msgspec.Meta(pattern="^(/.*)?$", title='an absolute path, or "" for run_dir')]
KeysFile = Annotated[str, msgspec.Meta(pattern="^(/.*)?$", title='an absolute path, or ""')]
KeyFile = Annotated[str, msgspec.Meta(pattern="^(/.*)?$", title='an absolute path, or ""')]
FileMode = Annotated[int, msgspec.Meta(ge=0, le=0o777, title="an octal file mode such as 0o660")]
NumericIds = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(title="a list of numeric ids")
]
PublicKeys = Annotated[
    tuple[Annotated[str, msgspec.Meta(pattern=r"^([0-9a-fA-F]{64}|any)\Z")], ...],
    msgspec.Meta(title='a list of public keys of 64 hex digits, or ["any"]'),
]
Networks = Annotated[
    tuple[Annotated[str, msgspec.Meta(pattern=r"^[0-9a-fA-F:.]+(/\d{1,3})?\Z")], ...],
    msgspec.Meta(title="a list of networks such as 10.0.0.0/16"),
]
HostNames = Annotated[
    tuple[Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,253}\Z")], ...],
    msgspec.Meta(title="a list of host names, without a port"),
]
TcpEndpoint = Annotated[
    str, msgspec.Meta(pattern=rf"^tcp://{_HOST_PORT}\Z", title="tcp://host:port; port 0 takes any free one")
]
AdvertisedEndpoint = Annotated[
    str,
    msgspec.Meta(pattern=rf"^(tcp://{_HOST_PORT})?\Z", title='tcp://host:port that other nodes reach, or ""'),
]
HostPort = Annotated[
    str,
    msgspec.Meta(pattern=rf"^({_HOST_PORT})?\Z", title='host:port; port 0 takes any free one; "" is off'),
]
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000, title="a count, 1 to 1000000")]
ByteCount = Annotated[int, msgspec.Meta(ge=1, le=1 << 60, title="bytes")]
ByteCountOrZero = Annotated[int, msgspec.Meta(ge=0, le=1 << 60, title="bytes, or 0")]
PoolSize = Annotated[int, msgspec.Meta(ge=0, le=64, title="a count, 0 to 64")]
Environment = Annotated[dict[str, str], msgspec.Meta(title="a table of NAME = text")]
Switch = Annotated[bool, msgspec.Meta(title="true or false")]
MoverLibrary = Annotated[Literal["auto", "nixl", "rixl"], msgspec.Meta(title="auto, nixl or rixl")]
MoverBackend = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[A-Za-z][A-Za-z0-9_]{0,31}\Z", title="a backend's name, such as UCX or LIBFABRIC"
    ),
]
MoverPlacement = Annotated[Literal["auto", "direct", "staged"], msgspec.Meta(title="auto, direct or staged")]
MoverRead = Annotated[
    Literal["auto", "direct", "covering"],
    msgspec.Meta(title="auto, direct or covering"),
]
HttpUrl = Annotated[
    str,
    msgspec.Meta(pattern=r"^(https?://[^\s/?#@]+(/[^\s?#]*)?)?\Z", title='http://host:port, or ""'),
]
Share = Annotated[float, msgspec.Meta(ge=0, le=1, title="a share, 0 to 1")]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], msgspec.Meta(title="debug, info, warning or error")
]
LogFormat = Annotated[Literal["auto", "console", "json"], msgspec.Meta(title="auto, console or json")]


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Return host (an IPv6 one in its brackets) and port of ``tcp://host:port``. Raises ValueError."""
    match = re.fullmatch(rf"tcp://{_HOST_PORT}", endpoint)
    if match is None:
        raise ValueError(f"not of the form tcp://host:port: {endpoint!r}")
    return match[1], int(match[2])


def split_host_port(text: str) -> tuple[str, int]:
    """Return host (an IPv6 one without brackets) and port of ``host:port``. Raises ValueError."""
    host, port = split_endpoint(f"tcp://{text}")
    return host.strip("[]"), port
