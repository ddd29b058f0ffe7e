"""What the operator may set: one frozen `Config`, read once from file, environment and flags.

A later source wins: defaults, then the TOML file, then `KVXFERD_SECTION_KEY` in the environment,
then flags. Whatever is not known or not in range is refused with the name of the key, where it
came from and what would be right; nothing is guessed and nothing is ignored.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import msgspec

from kvxferd.errors import ConfigError

ENVIRONMENT_PREFIX = "KVXFERD_"
# Names the file itself, for `kvxferd serve`; the only KVXFERD_ name that is no setting.
CONFIG_PATH_VARIABLE = "KVXFERD_CONFIG"
# Kubernetes puts these into every container beside a Service called kvxferd or kvxferd-something.
_SERVICE_LINK = re.compile(
    r"KVXFERD(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?"
    r"|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
_PORT = r"(6553[0-5]|655[0-2]\d|65[0-4]\d\d|6[0-4]\d{3}|[1-5]\d{4}|\d{1,4})"
_HOST_PORT = rf"(\[[0-9a-fA-F:.%]+\]|[^\s\[\]:/]+):{_PORT}"
_WILDCARDS = frozenset({"*", "0.0.0.0", "[::]"})
# sockaddr_un holds 108 bytes, the last of them zero.
_MAX_SOCKET_PATH_BYTES = 107

# `title` is what a right value looks like: it ends refusals and stands in `serve --help`.
Seconds = Annotated[float, msgspec.Meta(ge=0.01, le=86_400, title="seconds, 0.01 to 86400")]
SecondsOrZero = Annotated[float, msgspec.Meta(ge=0, le=86_400, title="seconds, 0 to 86400")]
Directory = Annotated[str, msgspec.Meta(pattern="^/", title="an absolute path")]
SocketPath = Annotated[str, msgspec.Meta(pattern="^(/.*)?$", title='an absolute path, or "" for run_dir')]
FileMode = Annotated[int, msgspec.Meta(ge=0, le=0o777, title="an octal file mode such as 0o660")]
Ids = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(title="a list of numeric ids")]
TcpEndpoint = Annotated[
    str, msgspec.Meta(pattern=rf"^tcp://{_HOST_PORT}\Z", title="tcp://host:port; port 0 takes any free one")
]
Advertised = Annotated[
    str,
    msgspec.Meta(pattern=rf"^(tcp://{_HOST_PORT})?\Z", title='tcp://host:port that other nodes reach, or ""'),
]
HostPort = Annotated[
    str,
    msgspec.Meta(pattern=rf"^({_HOST_PORT})?\Z", title='host:port; port 0 takes any free one; "" is off'),
]
PoolSize = Annotated[int, msgspec.Meta(ge=0, le=64, title="a count, 0 to 64")]
Environment = Annotated[dict[str, str], msgspec.Meta(title="a table of NAME = text")]
MoverLibrary = Annotated[Literal["auto", "nixl", "rixl"], msgspec.Meta(title="auto, nixl or rixl")]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], msgspec.Meta(title="debug, info, warning or error")
]
LogFormat = Annotated[Literal["auto", "console", "json"], msgspec.Meta(title="auto, console or json")]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections: a TOML table each."""


class NodeConfig(Section, frozen=True):
    """Where this daemon keeps what it puts into the file system."""

    run_dir: Directory = "/run/kvxferd"


class WorkerConfig(Section, frozen=True):
    """The socket on which engines' processes register."""

    socket: SocketPath = ""
    mode: FileMode = 0o660
    allowed_uids: Ids = ()  # both lists empty: the file's mode decides
    allowed_gids: Ids = ()


class ControlConfig(Section, frozen=True):
    """The socket on which the operator's commands arrive: HTTP, mode 0660."""

    socket: SocketPath = ""


class HttpConfig(Section, frozen=True):
    """Metrics, health and the status page over TCP; nothing there changes state."""

    bind: HostPort = "127.0.0.1:9440"


class PeerConfig(Section, frozen=True):
    """The socket on which other nodes' daemons ask."""

    bind: TcpEndpoint = "tcp://127.0.0.1:9441"
    advertise: Advertised = ""  # "": what was bound
    handshake_wait_s: Seconds = 10.0  # for an engine whose ranks are still registering
    request_timeout_s: Seconds = 2.0  # an unanswered question is sent again after this
    silent_after_s: Seconds = 10.0  # a peer that has not answered for this long is taken for gone


class TransferConfig(Section, frozen=True):
    """How long a published request's blocks are held."""

    lease_s: Seconds = 30.0  # for a publish that names none
    max_hold_s: Seconds = 600.0  # a reader may renew its grant for this long in all
    unknown_wait_s: SecondsOrZero = 1.0  # a reference may outrun its publish by this much


class MoverConfig(Section, frozen=True):
    """The child processes that own a NIXL agent each."""

    pool_size: PoolSize = 2  # kept ready for the next registrations
    library: MoverLibrary = "auto"
    environment: Environment = {}


class DrainConfig(Section, frozen=True):
    """What a stop waits for."""

    limit_s: SecondsOrZero = 30.0


class LogConfig(Section, frozen=True):
    """The log, on standard error."""

    level: LogLevel = "info"
    format: LogFormat = "auto"  # auto: console on a terminal, else JSON


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the operator may set. However it was made, its socket paths are filled in."""

    node: NodeConfig = NodeConfig()
    worker: WorkerConfig = WorkerConfig()
    control: ControlConfig = ControlConfig()
    http: HttpConfig = HttpConfig()
    peer: PeerConfig = PeerConfig()
    transfer: TransferConfig = TransferConfig()
    mover: MoverConfig = MoverConfig()
    drain: DrainConfig = DrainConfig()
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        """Fill in the paths that follow from `run_dir`. Raises ConfigError where two settings disagree."""
        for name, section in (("worker", self.worker), ("control", self.control)):
            if not section.socket:
                path = str(Path(self.node.run_dir) / f"{name}.sock")
                msgspec.structs.force_setattr(self, name, msgspec.structs.replace(section, socket=path))
        _check_sockets(self)
        _check_peer(self.peer)
        if self.transfer.max_hold_s < self.transfer.lease_s:
            raise ConfigError(
                f"cannot use transfer.max_hold_s = {self.transfer.max_hold_s:g}: it is shorter than a lease; "
                f"give transfer.lease_s = {self.transfer.lease_s:g} or more"
            )


class Setting(NamedTuple):
    """One key of the configuration, as file, environment and flags name it."""

    section: str
    field: str
    type: Any
    default: Any

    @property
    def key(self) -> str:
        """As it is named in messages: ``transfer.lease_s``."""
        return f"{self.section}.{self.field}"

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return f"{ENVIRONMENT_PREFIX}{self.section}_{self.field}".upper()

    @property
    def wanted(self) -> str:
        """What a right value looks like."""
        return next(m.title for m in self.type.__metadata__ if isinstance(m, msgspec.Meta) and m.title)


def _settings() -> Iterator[Setting]:
    for section in msgspec.structs.fields(Config):
        # Not `section.type`'s own fields: msgspec strips the annotations that carry `title`.
        types = get_type_hints(section.type, include_extras=True)
        for field in msgspec.structs.fields(section.type):
            default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
            yield Setting(section.name, field.name, types[field.name], default)


SETTINGS: Mapping[str, Setting] = {setting.key: setting for setting in _settings()}


def load_config(path: Path | None, environ: Mapping[str, str], flags: Mapping[str, str]) -> Config:
    """Return the configuration of file, environment and flags, the later winning.

    `flags` is keyed as in messages (``{"transfer.lease_s": "20"}``). Raises ConfigError.
    """
    values: dict[str, dict[str, Any]] = {}
    given = [*_from_file(path)] if path is not None else []
    given += _from_environment(environ)
    given += _from_flags(flags)
    for key, value, source in given:
        setting = _setting(key, source)
        values.setdefault(setting.section, {})[setting.field] = _checked(setting, value, source)
    return Config(**{f.name: f.type(**values.get(f.name, {})) for f in msgspec.structs.fields(Config)})


def flag_name(key: str) -> str:
    """Return the flag of `kvxferd serve` that sets a key: ``--transfer-lease-s``."""
    return "--" + key.replace(".", "-").replace("_", "-")


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


def _from_file(path: Path) -> Iterator[tuple[str, Any, str]]:
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: it is not TOML: {error}") from error
    sections = {key.partition(".")[0] for key in SETTINGS}
    for section, table in document.items():
        if section not in sections or not isinstance(table, dict):
            raise ConfigError(
                f"cannot use {section} of {path}: the tables there are {', '.join(sorted(sections))}"
            )
        for field, value in table.items():
            yield f"{section}.{field}", value, str(path)


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    keys = {setting.variable: setting.key for setting in SETTINGS.values()}
    for name, text in sorted(environ.items()):
        if not name.startswith(ENVIRONMENT_PREFIX) or name == CONFIG_PATH_VARIABLE:
            continue
        if name in keys:
            yield keys[name], _parse_text(keys[name], text, name), name
        elif not _SERVICE_LINK.fullmatch(name):
            raise ConfigError(
                f"cannot use {name} from the environment: no setting has that name; "
                f"names are {ENVIRONMENT_PREFIX}SECTION_KEY, such as KVXFERD_TRANSFER_LEASE_S"
            )


def _from_flags(flags: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    for key, text in flags.items():
        yield key, _parse_text(key, text, f"flag {flag_name(key)}"), f"flag {flag_name(key)}"


def _setting(key: str, source: str) -> Setting:
    """Return the setting of that key. Raises ConfigError naming the section's real keys."""
    if key in SETTINGS:
        return SETTINGS[key]
    section = key.partition(".")[0]
    known = [s.field for s in SETTINGS.values() if s.section == section]
    raise ConfigError(
        f"cannot use {key} from {source}: no setting has that name; [{section}] has {', '.join(known)}"
    )


def _parse_text(key: str, text: str, source: str) -> Any:
    """Return the text of a variable or flag as the value that a TOML file would hold."""
    setting = _setting(key, source)
    try:
        if setting.type is FileMode:
            return int(text, 8)  # "660", "0660" and "0o660" alike
        if setting.type is Ids:
            return [int(part) for part in text.split(",") if part.strip()]
        if setting.type is Environment:
            pairs = [part.partition("=") for part in text.split(",") if part.strip()]
            if any(not separator for _, separator, _ in pairs):
                raise ValueError("a pair without '='")
            return {name.strip(): value for name, _, value in pairs}
        return msgspec.convert(text, setting.type, strict=False)
    except (ValueError, msgspec.ValidationError) as error:
        raise _refusal(setting, text, source) from error


def _checked(setting: Setting, value: Any, source: str) -> Any:
    """Return the value as the setting's type. Raises ConfigError naming key, source and a right value."""
    try:
        return msgspec.convert(value, setting.type)
    except msgspec.ValidationError as error:
        raise _refusal(setting, value, source) from error


def _refusal(setting: Setting, value: object, source: str) -> ConfigError:
    return ConfigError(f"cannot use {setting.key} = {value!r} from {source}: give {setting.wanted}")


def _check_sockets(config: Config) -> None:
    for key, path in (("worker.socket", config.worker.socket), ("control.socket", config.control.socket)):
        if len(path.encode()) > _MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"cannot use {key} = {path!r}: a Unix socket's path has at most "
                f"{_MAX_SOCKET_PATH_BYTES} bytes; give a shorter node.run_dir"
            )
    if config.worker.socket == config.control.socket:
        raise ConfigError(f"cannot use control.socket = {config.control.socket!r}: worker.socket is the same")


def _check_peer(peer: PeerConfig) -> None:
    if not peer.advertise:
        if split_endpoint(peer.bind)[0] in _WILDCARDS:
            raise ConfigError(
                f"cannot use peer.bind = {peer.bind!r} alone: other nodes cannot connect to a wildcard; "
                "set peer.advertise to the tcp://host:port at which they reach this node"
            )
        return
    host, port = split_endpoint(peer.advertise)
    if host in _WILDCARDS or port == 0:
        raise ConfigError(
            f"cannot use peer.advertise = {peer.advertise!r}: nobody can connect to that; "
            "give the host and port at which other nodes reach this one"
        )
