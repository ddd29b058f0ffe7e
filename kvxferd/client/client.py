"""Reaching a daemon, and becoming a rank or a publisher there."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from kvxferd import __version__
from kvxferd.client.blocking import error_from_refusal, wait_for_reply, wait_for_welcome
from kvxferd.client.connection import Connection
from kvxferd.client.membership import PublisherRole, RankRole, SessionRole, validated
from kvxferd.client.memory_export import Regions, export_memory
from kvxferd.client.mover_watch import LaunchMover
from kvxferd.client.rank import Publisher, RankHandle
from kvxferd.client.refs import check_name
from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import EngineId, Generation
from kvxferd.layout import EngineSpec, RankLayout


def connect(path: str | os.PathLike[str], *, timeout_s: float = 10.0, name: str = "") -> Client:
    """Return a connection to the daemon of this node. Blocks until it greets.

    `name` is what its log calls this process. Raises KvxferdError after `timeout_s`, or at once
    when waiting cannot help. A process forked from this one must not use the connection.
    """
    checked_name = check_name(name or "engine", "a client's name", Code.BAD_REQUEST)
    label = f"{checked_name} (kvxferd {__version__}, pid {os.getpid()})"
    connection = Connection(Path(path), label)
    try:
        with connection.lock:
            wait_for_welcome(connection, timeout_s)
    except BaseException:
        connection.close()
        raise
    return Client(connection)


class Client:
    """A connection that becomes one rank or one publisher. A process with more ranks connects for each."""

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

        `regions` gives the sealed memory of each region of the layout: a mapping, or a list of
        `Region` where several lie in one memory. Every rank of an engine gives one generation,
        chosen by the first. Raises EngineError with the daemon's code and sentence when it
        refuses (with the code `busy` and `retry_after_s` at one of its limits), and the connection can be
        used again; KvxferdError after `timeout_s`. `launch` starts movers inside this process, for memory
        that no other can map: `kvxferd.resident.register` gives it.
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
        """Become a publisher without memory: an engine's scheduler. Raises as `register` does."""
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
                refusal = wait_for_reply(connection, f"register {role}", timeout_s)
            except KvxferdError:
                connection.session.registration.give_up()
                connection.request_disconnect()  # an answer that comes late must not register anything
                raise
            if refusal is not None:
                raise error_from_refusal(refusal)

    def close(self) -> None:
        """Close the connection, and with it the rank or publisher that it became; see `Publisher.close`."""
        self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
