"""`connect` and `Client`: reach a daemon, and become a rank or a publisher there."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from kvxferd import __version__
from kvxferd.client.arguments import check_name
from kvxferd.client.connection import Connection
from kvxferd.client.memory_export import Regions, export_memory
from kvxferd.client.mover_watch import LaunchMover
from kvxferd.client.rank import Publisher, RankHandle
from kvxferd.client.registration import PublisherRole, RankRole, SessionRole, validated
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.ids import EngineId, Generation
from kvxferd.layout import EngineSpec, RankLayout


def connect(path: str | os.PathLike[str], *, timeout_s: float = 10.0, name: str = "") -> Client:
    """Return a connection to the daemon of this node. Blocks until the daemon has welcomed it.

    A process forked from this one must not use the connection.

    Args:
        path: the daemon's worker socket, `worker.socket` in its configuration.
        timeout_s: seconds to wait for a daemon that is not there yet or does not reply.
        name: 1 to 256 characters by which the daemon's log names this process.

    Raises:
        KvxferdError: no daemon within `timeout_s` (`daemon-lost`, `deadline`); at once where waiting
            cannot help: no permission for the socket (`not-allowed`), no common protocol version
            (`bad-version`).
    """
    checked_name = check_name(name or "engine", "a client's name", Code.BAD_REQUEST)
    label = f"{checked_name} (kvxferd {__version__}, pid {os.getpid()})"
    connection = Connection(Path(path), label)
    try:
        with connection.lock:
            connection.wait_welcomed(timeout_s)
    except BaseException:
        connection.close()
        raise
    return Client(connection)


class Client:
    """A connection that becomes one rank or one publisher. A process of several ranks opens one for each."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def register(
        self,
        engine: EngineSpec,
        layout: RankLayout,
        regions: Regions,
        timeout_s: float = 30.0,
        launch: LaunchMover | None = None,
    ) -> RankHandle:
        """Become a rank. Blocks until the daemon has mapped the memory.

        Args:
            engine: the engine and this rank's place in it. All ranks of an engine give the same
                generation, chosen by the first and new at each start.
            layout: how the rank's KV cache lies in its regions; `kvxferd.layout.presets` builds one.
            regions: the memory of each region of the layout, by its id: a `kvxferd.memory.SealedMemory`
                or another sealed memfd, a `DeviceMemory` of a GPU, a `ResidentMemory`, which only this
                process can reach, or what `kvxferd.memory.share` returned, with an offset in one of these.
            timeout_s: seconds to wait for the daemon's reply.
            launch: starts movers inside this process, for memory that no other process can map;
                `kvxferd.resident.register` passes it.

        Raises:
            EngineError: the daemon refused, with its code and message (at one of its limits the code
                `busy` and `retry_after_s`). The connection can be used again.
            LayoutError: a field of `engine` or `layout` has the wrong type.
            DeviceError: a GPU's memory cannot be exported.
            KvxferdError: no reply within `timeout_s` (`deadline`), or the daemon is gone (`daemon-lost`).
        """
        engine, layout = validated(engine, "engine"), validated(layout, "layout")
        exports = export_memory(layout, regions)
        try:
            self._register(RankRole(engine, layout, exports), timeout_s, launch)
        except BaseException:
            exports.close()
            raise
        return RankHandle(self._connection, engine, layout)

    def attach(self, engine_id: str, generation: str, timeout_s: float = 30.0) -> Publisher:
        """Become a publisher without memory: an engine's scheduler. Blocks until the daemon has accepted.

        Args:
            engine_id: the engine, as its ranks register it.
            generation: the engine's present generation, the same as its ranks'.
            timeout_s: seconds to wait for the daemon's reply.

        Raises:
            EngineError: the daemon refused, with its code and message.
            KvxferdError: no reply within `timeout_s` (`deadline`), or the daemon is gone (`daemon-lost`).
        """
        role = PublisherRole(
            EngineId(check_name(engine_id, "an engine id", Code.RANK_INVALID)),
            Generation(check_name(generation, "a generation", Code.RANK_INVALID)),
        )
        self._register(role, timeout_s)
        return Publisher(self._connection)

    def _register(self, role: SessionRole, timeout_s: float, launch: LaunchMover | None = None) -> None:
        connection = self._connection
        with connection.lock:
            connection.session.register(role, launch)
            connection.wake()
            try:
                connection.wait_replied(f"register {role}", timeout_s)
            except EngineError:  # refused
                raise
            except KvxferdError:
                connection.session.registration.give_up()
                connection.request_disconnect()  # a late reply must not register anything
                raise

    def close(self) -> None:
        """Close the connection, and with it the rank or publisher that it became; see `Publisher.close`."""
        self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
