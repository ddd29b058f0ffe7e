"""The configuration's sections: one frozen struct for each TOML table."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import msgspec

from kvxferd.config.types import (
    AdvertisedEndpoint,
    ByteCount,
    ByteCountOrZero,
    Count,
    Directory,
    Environment,
    FileMode,
    HostNames,
    HostPort,
    HttpUrl,
    KeyFile,
    KeysFile,
    LogFormat,
    LogLevel,
    MoverBackend,
    MoverLibrary,
    MoverPlacement,
    MoverRead,
    Networks,
    NumericIds,
    PoolSize,
    PublicKeys,
    Seconds,
    SecondsOrZero,
    Share,
    SocketPath,
    Switch,
    TcpEndpoint,
    split_endpoint,
)
from kvxferd.errors import ConfigError

_WILDCARDS = frozenset({"*", "0.0.0.0", "[::]"})
ANY_KEY = "any"  # in peer.curve_allowed_keys
# sockaddr_un holds 108 bytes, the last of them zero.
_MAX_SOCKET_PATH_BYTES = 107


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of the sections."""


class NodeConfig(Section, frozen=True):
    """The directory of the daemon's sockets, locks and state."""

    run_dir: Directory = "/run/kvxferd"


class WorkerConfig(Section, frozen=True):
    """The socket on which engines' processes register."""

    socket: SocketPath = ""
    mode: FileMode = 0o660
    allowed_uids: NumericIds = ()  # both lists empty: the file's mode decides
    allowed_gids: NumericIds = ()
    ownership_s: Seconds = 600.0  # an engine id stays reserved for its user after its last rank has left


class ControlConfig(Section, frozen=True):
    """The socket for the operator's commands: HTTP, mode 0660."""

    socket: SocketPath = ""


class HttpConfig(Section, frozen=True):
    """Metrics, health and the status page over TCP; read-only."""

    bind: HostPort = "127.0.0.1:9440"
    hosts: HostNames = ()  # names by which clients reach it, beside its addresses and the node's own name


class PeerConfig(Section, frozen=True):
    """The socket for requests of other nodes' daemons."""

    bind: TcpEndpoint = "tcp://127.0.0.1:9441"
    advertise: AdvertisedEndpoint = ""  # "": the bound address
    handshake_wait_s: Seconds = 10.0  # for an engine whose ranks are still registering
    request_timeout_s: Seconds = 2.0  # an unanswered request is sent again after this
    silent_after_s: Seconds = 10.0  # a peer that has not replied for this long counts as gone
    restart_grace_s: Seconds = 1.0  # a peer that accepts no connection for this long counts as gone
    pp_aware: Switch = True  # False: engines here read sources of one pipeline stage only
    curve_secret_key_file: KeyFile = ""  # written by `kvxferd keygen`; "": no CURVE
    curve_allowed_keys: PublicKeys = ()  # peers' public keys; ("any",): every peer that uses CURVE
    curve_allowed_keys_file: KeysFile = ""  # more of them, one a line; read again when it changes
    allowed_addresses: Networks = ()  # peers' addresses; empty: any


class TransferConfig(Section, frozen=True):
    """How long a published transfer's blocks are held."""

    lease_s: Seconds = 30.0  # for a publish without a lease of its own
    max_hold_s: Seconds = 600.0  # a reader renews its grant, or waits for what is written, no longer
    unknown_wait_s: SecondsOrZero = 1.0  # a pull may arrive this much before the publish it refers to


class MoverConfig(Section, frozen=True):
    """The mover processes, each with a NIXL agent."""

    pool_size: PoolSize = 2  # kept ready for the next registrations
    library: MoverLibrary = "auto"
    placement: MoverPlacement = "auto"  # of GPU memory. direct: also over TCP; staged: always by copies
    backend: MoverBackend = "UCX"  # the plugin of the library
    backend_parameters: Environment = {}
    read: MoverRead = "auto"  # direct: run by run; covering: in fewer reads; auto: what is faster
    environment: Environment = {}


class DrainConfig(Section, frozen=True):
    """How long a stop waits."""

    limit_s: SecondsOrZero = 30.0


class LimitsConfig(Section, frozen=True):
    """Limits past which the node refuses with `busy` and a time after which to retry."""

    max_sessions: Count = 256  # connections on the worker socket
    max_ranks: Count = 128  # registered on this node
    max_transfers_per_engine: Count = 8192  # published and not released
    max_pulls_per_rank: Count = 1024  # that have not ended
    max_inflight_bytes: ByteCount = 1 << 40  # of those pulls, all ranks together
    max_peers: Count = 512  # daemons that this one connects to
    staging_bytes: ByteCountOrZero = 256 << 20  # memory for covering reads, of all movers; 0: none


class MetricsConfig(Section, frozen=True):
    """Series with labels that come from outside: each of them for 64 names at most, then "other"."""

    by_engine: Switch = False  # pulls and bytes for each pair of source and sink engine
    by_peer: Switch = False  # pulls and bytes for each other daemon


class LogConfig(Section, frozen=True):
    """The log, on standard error."""

    level: LogLevel = "info"
    format: LogFormat = "auto"  # auto: console on a terminal, else JSON


class TracingConfig(Section, frozen=True):
    """Spans of transfers, sent to an OpenTelemetry collector. Needs the extra `kvxferd[tracing]`."""

    endpoint: HttpUrl = ""  # of the collector, OTLP over HTTP; "": no spans are made
    sample_ratio: Share = 0.0  # of the transfers whose engine gave no traceparent


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings. The constructor fills in the socket paths and checks that sections agree."""

    node: NodeConfig = NodeConfig()
    worker: WorkerConfig = WorkerConfig()
    control: ControlConfig = ControlConfig()
    http: HttpConfig = HttpConfig()
    peer: PeerConfig = PeerConfig()
    transfer: TransferConfig = TransferConfig()
    mover: MoverConfig = MoverConfig()
    drain: DrainConfig = DrainConfig()
    limits: LimitsConfig = LimitsConfig()
    metrics: MetricsConfig = MetricsConfig()
    log: LogConfig = LogConfig()
    tracing: TracingConfig = TracingConfig()

    def __post_init__(self) -> None:
        """Fill in the paths that follow from `run_dir`. Raises ConfigError if two settings contradict."""
        for name, section in (("worker", self.worker), ("control", self.control)):
            if not section.socket:
                # In a directory of its own, so that pods mount the socket without its neighbours.
                own = "worker/worker.sock" if name == "worker" else f"{name}.sock"
                path = str(Path(self.node.run_dir) / own)
                msgspec.structs.force_setattr(self, name, msgspec.structs.replace(section, socket=path))
        _check_sockets(self)
        _check_peer(self.peer)
        _check_allowlists(self.peer)
        if self.transfer.max_hold_s < self.transfer.lease_s:
            raise ConfigError(
                f"cannot use transfer.max_hold_s = {self.transfer.max_hold_s:g}: it is shorter than a lease; "
                f"give transfer.lease_s = {self.transfer.lease_s:g} or more"
            )


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


def _check_allowlists(peer: PeerConfig) -> None:
    keys = peer.curve_allowed_keys
    if peer.curve_secret_key_file and not keys and not peer.curve_allowed_keys_file:
        raise ConfigError(
            "cannot use peer.curve_secret_key_file alone: nobody would be let in; give the public keys of "
            'the other daemons in peer.curve_allowed_keys, or ["any"], or a file of them in '
            "peer.curve_allowed_keys_file"
        )
    if (keys or peer.curve_allowed_keys_file) and not peer.curve_secret_key_file:
        name = "curve_allowed_keys" if keys else "curve_allowed_keys_file"
        raise ConfigError(
            f"cannot use peer.{name} alone: without a key of its own this daemon does not speak "
            "CURVE; set peer.curve_secret_key_file to a file that `kvxferd keygen` wrote"
        )
    if ANY_KEY in keys and len(keys) > 1:
        raise ConfigError(f'cannot use peer.curve_allowed_keys: "{ANY_KEY}" stands alone, or keys are listed')
    if ANY_KEY in keys and peer.curve_allowed_keys_file:
        raise ConfigError(
            f'cannot use peer.curve_allowed_keys_file beside ["{ANY_KEY}"] in curve_allowed_keys, which '
            "admits every key; leave out one of the two"
        )
    for text in peer.allowed_addresses:
        try:
            ipaddress.ip_network(text)
        except ValueError as error:
            raise ConfigError(
                f"cannot use peer.allowed_addresses: {error}; give networks such as 10.0.0.0/16"
            ) from error
