"""Which peers this node admits: the allow-lists of the configuration and of its keys file, as they change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import structlog

from kvxferd.config import PeerConfig
from kvxferd.control.allowed_keys_file import AllowedKeysFile, KeysRead
from kvxferd.control.curve_keys import allowlist_of, exposure_of, read_key
from kvxferd.core.allowlist import PeerAllowlist
from kvxferd.ids import Endpoint
from kvxferd.telemetry.logs import operator_log
from kvxferd.telemetry.warnings import NodeWarning, WarningKind, warning_of

log = structlog.get_logger()

MAX_LOGGED_KEYS = 16  # in the line of a changed keys file


class AllowlistUse(NamedTuple):
    """What a change of the allow-lists came to.

    closes_connections: an entry was removed, so that connections to this node are shut; who is still
    admitted connects again.
    """

    dropped_peers: list[Endpoint]
    closes_connections: bool


class PeerAdmission:
    """The node's key and allow-lists.

    `use_allowlist` hands new ones to the node, and returns the peers that it dropped. Raises ConfigError
    where a key or the keys file cannot be read.
    """

    def __init__(
        self,
        config: PeerConfig,
        use_allowlist: Callable[[PeerAllowlist], list[Endpoint]],
        shut_connections: Callable[[], None],
    ) -> None:
        self._config = config
        self._use_allowlist = use_allowlist
        self._shut_connections = shut_connections
        key_file = config.curve_secret_key_file
        self.key = read_key(Path(key_file)) if key_file else None
        self._keys_file = AllowedKeysFile(config.curve_allowed_keys_file, key_file)
        self.allowlist = allowlist_of(config, self.key, self._keys_file.keys)

    def watch(self) -> None:
        """Read the keys file again, on the loop of the caller, whenever it changes."""
        loop = asyncio.get_running_loop()

        def on_read(found: KeysRead) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._on_keys_read, found)

        self._keys_file.start(on_read)

    def stop(self) -> None:
        """Watch no more."""
        self._keys_file.stop()

    def read_keys(self, config: PeerConfig) -> None:
        """Read the keys file of that configuration. Raises ConfigError, and then nothing changes."""
        self._keys_file.use(config.curve_allowed_keys_file)

    def apply(self, config: PeerConfig) -> AllowlistUse:
        """Use the allow-lists of that configuration and of the keys that were read last."""
        allowlist = allowlist_of(config, self.key, self._keys_file.keys)
        if allowlist == self.allowlist:
            self._config = config
            return AllowlistUse([], closes_connections=False)
        closes_connections = not allowlist.allows_all_of(self.allowlist)
        dropped = self._use_allowlist(allowlist)
        self.allowlist = allowlist
        self._config = config
        if closes_connections:
            self._shut_connections()
        return AllowlistUse(dropped, closes_connections)

    def warnings(self) -> list[NodeWarning]:
        """Return warnings where anybody may act as a peer, and where the keys file cannot be read."""
        found = []
        if sentence := exposure_of(self._config):
            found.append(warning_of(WarningKind.PEER_SOCKET_OPEN, "", sentence))
        if sentence := self._keys_file.problem:
            sentence += "; the keys that were read before are admitted meanwhile"
            file = self._config.curve_allowed_keys_file
            found.append(warning_of(WarningKind.ALLOWED_KEYS_UNREAD, file, sentence))
        return found

    def _on_keys_read(self, found: KeysRead) -> None:
        if found.problem:
            log.warning("allowed keys not read", reason=found.problem)
            return
        before = self.allowlist.allowed_keys or frozenset()
        used = self.apply(self._config)
        after = self.allowlist.allowed_keys or frozenset()
        operator_log.info(
            "allowed keys read",
            file=self._config.curve_allowed_keys_file,
            added=sorted(after - before)[:MAX_LOGGED_KEYS],
            removed=sorted(before - after)[:MAX_LOGGED_KEYS],
            num_keys=len(found.keys),
            dropped_peers=used.dropped_peers,
            closes_connections=used.closes_connections,
        )
